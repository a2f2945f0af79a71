// Attention over pages by itself, for models of which not all runs in one call; paged.h stands before it.


// 1: heads are too wide, or blocks no whole number of vectors; nothing is written then
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    if (c.k_dim > WIDEST || c.v_row > WIDEST || c.size % VW || SPAN % c.size || c.v_row % VW) return 1;
    over_pages(c);
    return 0;
}
