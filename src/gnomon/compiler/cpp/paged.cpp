// Attention over blocks by itself (gnomon/runtime/ops/paged.py); gnomon/serve has the same within whole layers.
#include "paged.h"

// 1: heads are too wide, or blocks no whole number of vectors; nothing is written then
extern "C" int gnomon_kernel(const Call* given) {
    const Call& c = *given;
    if (c.k_dim > WIDEST || c.v_row > WIDEST || c.size % VW || SPAN % c.size || c.v_row % VW) return 1;
    over_pages(c);
    return 0;
}
