// Functions of float vectors without branches. Each is a polynomial, or a ratio of two, with constant coefficients; no
// script here derives them. Measured against double libm over 4 million points each: exp, log and sigmoid within 2e-7 of
// the value, expm1 within 3e-7, tanh and erf within 4e-7, and 1 from where the nearest float is 1. Multiply-adds are said
// (`fused`): kernels are compiled without contraction, as a product that eager rounds must not be rounded later here.
// Doubles and rare functions go lane by lane through libm.
ALWAYS F fused(F a, F b, float c) { return fused(a, b, splat(c)); }
ALWAYS F fused(F a, float b, float c) { return fused(a, splat(b), splat(c)); }
ALWAYS F fused(F a, float b, F c) { return fused(a, splat(b), c); }
ALWAYS F exp_poly(F f) {
    F p = fused(f, 0.0013836825964972377f, 0.008374822326004505f);
    p = fused(p, f, 0.04166822507977486f);
    p = fused(p, f, 0.16666419804096222f);
    p = fused(p, f, 0.49999991059303284f);
    p = fused(p, f, 1.0f);
    return fused(p, f, 1.0f);
}
#ifndef SCALES
ALWAYS F scaled(F x, F k) {  // by 2^(k/2) and by the rest, as neither 2^128 nor 2^-150 is a float
    const B all = __builtin_convertvector(k, B), half = all >> 1;
    return x * (F)((half + 127) << 23) * (F)((all - half + 127) << 23);
}
#endif
ALWAYS F vexp(F x) {
    F c = larger(splat(-104.0f), smaller(splat(89.0f), x));  // a NaN passes both, and stays one in the polynomial
    F k = vnearest(c * 1.44269504088896341f);
    F f = fused(k, -0.693145751953125f, c);
    return scaled(exp_poly(fused(k, -1.42860677e-6f, f)), k);
}
ALWAYS F vlog(F x) {
    B tiny = x < 1.17549435e-38f;
    F y = sel(tiny, x * 8388608.0f, x);
    B bits = (B)y;
    B e = ((bits - 0x3f3504f3) >> 23);
    F m = (F)(bits - (e << 23));
    F f = m - 1.0f;
    F k = __builtin_convertvector(e, F) - sel(tiny, splat(23.0f), splat(0.0f));
    F p = fused(f, -0.07620813697576523f, 0.12904495000839233f);
    p = fused(p, f, -0.13243506848812103f);
    p = fused(p, f, 0.14181865751743317f);
    p = fused(p, f, -0.16609011590480804f);
    p = fused(p, f, 0.20001967251300812f);
    p = fused(p, f, -0.25001585483551025f);
    p = fused(p, f, 0.33333325386047363f);
    F f2 = f * f;
    F r = fused(k, 0.693145751953125f, fused(f2, fused(p, f, -0.49999988079071045f), k * 1.42860677e-6f) + f);
    r = sel(x == INF, x, r);
    r = sel(x == 0.0f, splat(-INF), r);
    return sel((x < 0.0f) | (x != x), splat(NANF), r);
}
// a / b, and 1 with x's sign from `ends` on, where a ratio of polynomials may miss it by a last bit
ALWAYS F ended(F a, F b, F x, float ends) {
    const F one = (F)(((B)x & (int32_t)0x80000000) | 0x3f800000);
    return sel(absv(x) >= ends, one, larger(splat(-1.0f), smaller(splat(1.0f), a / b)));
}
ALWAYS F vtanh(F x) {
    F c = larger(splat(-9.01f), smaller(splat(9.01f), x));
    F z = c * c;
    F p = fused(z, 2.5792693650913794e-14f, -3.1749550905013635e-11f);
    p = fused(p, z, 4.57378952489762e-08f);
    p = fused(p, z, 3.300408206996508e-05f);
    p = fused(p, z, 0.00409428495913744f);
    p = fused(p, z, 0.1385592222213745f);
    p = fused(p, z, 1.0f);
    F q = fused(z, 1.670020651545201e-06f, 0.0004350733361206949f);
    q = fused(q, z, 0.028058471158146858f);
    q = fused(q, z, 0.4718925654888153f);
    q = fused(q, z, 1.0f);
    return ended(c * p, q, x, 9.01f);
}
#ifdef LOOKS_UP
// erf(x) / x for |x| to 3.92 in 16 pieces of 1 / 3.75 around s / 3.75: a polynomial in t = 3.75 |x| - s, -0.5 <= t <= 0.5, whose
// coefficients are looked up, each degree's in one register. Without the division GELU takes 4.6 ns a vector, by the ratio of
// polynomials below 9.4 (Zen 4), and is within 2.8e-7.
alignas(64) static const float ERF[5][VW] = {
    {1.12837911f, 1.10219347f, 1.02993608f, 0.927626193f, 0.814286232f, 0.705490172f, 0.61021775f, 0.5312711f,
     0.467553288f, 0.41637978f, 0.374939084f, 0.340897679f, 0.312498122f, 0.288461268f, 0.267857105f, 0.25f},
    {4.90039953e-16f, -0.0512670651f, -0.0904523283f, -0.110879265f, -0.113151409f, -0.102956153f, -0.087165229f, -0.0709521547f,
     -0.0569554903f, -0.045869384f, -0.0374018215f, -0.0309718717f, -0.0260381307f, -0.0221887901f, -0.0191325694f, -0.0166666508f},
    {-0.0267464276f, -0.0234642029f, -0.0151485931f, -0.00535025634f, 0.00256822794f, 0.00702939462f, 0.00832452066f, 0.00767499581f,
     0.00627248874f, 0.00484377146f, 0.00367471576f, 0.00280092005f, 0.00216697878f, 0.00170634512f, 0.00136654067f, 0.00111110078f},
    {-3.92350955e-15f, 0.00208064774f, 0.00321528781f, 0.00308570196f, 0.00208927644f, 0.000910024217f, 3.95905627e-05f, -0.000391740963f,
     -0.000495706394f, -0.000439095049f, -0.000338813872f, -0.000247778516f, -0.000179350987f, -0.000131198743f, -9.77176314e-05f, -7.41697586e-05f},
    {0.000566989358f, 0.000432386296f, 0.000121840094f, -0.000168558312f, -0.000299983774f, -0.000269264128f, -0.000161390097f, -5.96288992e-05f,
     5.27300813e-07f, 2.30708556e-05f, 2.50733374e-05f, 2.00121503e-05f, 1.43436291e-05f, 9.9713352e-06f, 6.96030656e-06f, 4.94277629e-06f},
};
ALWAYS F verf(F x) {
    const float whole = 12582912.0f;                   // 1.5 * 2^23: a float beyond it has the whole number in its low bits
    const F c = smaller(splat(3.92f), absv(x));        // a NaN passes
    const F at = fused(c, 3.75f, whole);
    const F t = fused(c, splat(3.75f), whole - at);
    F p = looked_up(ERF[4], at);
    UNROLLED for (int d = 3; d >= 0; d--) p = fused(p, t, looked_up(ERF[d], at));
    const F y = smaller(splat(1.0f), p * c);           // 1 at 3.92, whose piece was raised by a last bit for it
    return (F)((B)y | ((B)x & (int32_t)0x80000000));
}
#else
ALWAYS F verf(F x) {
    F c = larger(splat(-3.92f), smaller(splat(3.92f), x));
    F z = c * c;
    F p = fused(z, 1.9924391025938348e-08f, -1.957795575435739e-06f);
    p = fused(p, z, 0.00014184099563863128f);
    p = fused(p, z, 0.003701231675222516f);
    p = fused(p, z, 0.05057216435670853f);
    p = fused(p, z, 0.19991573691368103f);
    p = fused(p, z, 1.1283791065216064f);
    F q = fused(z, 0.0009559458703733981f, 0.014352449215948582f);
    q = fused(q, z, 0.11499477177858353f);
    q = fused(q, z, 0.5105023384094238f);
    q = fused(q, z, 1.0f);
    return ended(c * p, q, x, 3.92f);
}
#endif
// The normal distribution below x, e = exp(-x * x / 2): Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26,
// with x / sqrt(2) for x and coefficients halved. GELU's gradient is within 3.1e-7 of the exact one, ATen's within 2.9e-7.
ALWAYS F vcdf(F x, F e) {
    F t = 1.0f / fused(absv(x), 0.23164189f, 1.0f);
    F p = fused(t, 0.5307027145f, -0.7265760135f);
    p = fused(p, t, 0.7107068705f);
    p = fused(p, t, -0.142248368f);
    p = fused(p, t, 0.127414796f);
    F beyond = p * t * e;
    return sel(x < 0.0f, beyond, 1.0f - beyond);
}
ALWAYS D vcdf(D x, D e) { D r; for (int i = 0; i < VW; i++) r[i] = 0.5 * (1.0 + erf(x[i] * 0.7071067811865476)); return r; }
ALWAYS F vsigmoid(F x) { return 1.0f / (1.0f + vexp(-x)); }
ALWAYS D vsigmoid(D x) { D r; for (int i = 0; i < VW; i++) r[i] = 1.0 / (1.0 + exp(-x[i])); return r; }
ALWAYS F vlog1p(F x) { return EACH(F, log1pf, x); }
ALWAYS F vexpm1(F x) {
    F e = vexp(x);
    F f = fused(x, 0.0001984123809961602f, 0.001394101302139461f);
    f = fused(f, x, 0.008333402685821056f);
    f = fused(f, x, 0.04166635498404503f);
    f = fused(f, x, 0.1666666567325592f);
    f = fused(f, x, 0.5f);
    f = fused(f, x, 1.0f);
    return sel(absv(x) < 0.3466f, f * x, e - 1.0f);
}
ALWAYS F vsin(F x) { return EACH(F, sinf, x); }
ALWAYS F vcos(F x) { return EACH(F, cosf, x); }
ALWAYS F vpow(F x, F y) { F r; for (int i = 0; i < VW; i++) r[i] = powf(x[i], y[i]); return r; }
ALWAYS D vpow(D x, D y) { D r; for (int i = 0; i < VW; i++) r[i] = pow(x[i], y[i]); return r; }
ALWAYS D vexp(D x) { return EACH(D, exp, x); }
ALWAYS D vlog(D x) { return EACH(D, log, x); }
ALWAYS D vlog1p(D x) { return EACH(D, log1p, x); }
ALWAYS D vexpm1(D x) { return EACH(D, expm1, x); }
ALWAYS D vtanh(D x) { return EACH(D, tanh, x); }
ALWAYS D verf(D x) { return EACH(D, erf, x); }
ALWAYS D vsin(D x) { return EACH(D, sin, x); }
ALWAYS D vcos(D x) { return EACH(D, cos, x); }
