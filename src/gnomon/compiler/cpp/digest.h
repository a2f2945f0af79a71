// A digest of memory, so that what was made of it is made again once somebody has written it, by whatever means.
#pragma once

namespace {

constexpr int STREAMS = 4;                             // read beside each other: memory answers more than one at a time

ALWAYS void stirred(U& a, U w) {
    a = (a ^ w) * 0x9E3779B1u + 0x7F4A7C15u;
    a ^= a >> 15;
}

ALWAYS uint64_t digest(const char* p, int64_t bytes) {
    U a[STREAMS][2] = {};
    const int64_t wide = sizeof(U), step = 2 * wide, each = bytes / (STREAMS * step) * step;
    for (int64_t i = 0; i < each; i += step)
        for (int s = 0; s < STREAMS; s++)
            for (int j = 0; j < 2; j++) {
                U w;
                memcpy(&w, p + s * each + i + j * wide, sizeof w);
                stirred(a[s][j], w);
            }
    for (int64_t at = STREAMS * each, n = 0; at < bytes; at += wide, n++) {
        U w = {};
        memcpy(&w, p + at, (size_t)(bytes - at < wide ? bytes - at : wide));
        stirred(a[n / 2 % STREAMS][n % 2], w);
    }
    uint64_t all = (uint64_t)bytes;
    for (int s = 0; s < STREAMS; s++)
        for (int j = 0; j < 2; j++)
            for (int l = 0; l < VW; l++) all = ((all ^ a[s][j][l]) * 0x9E3779B97F4A7C15u) ^ (all >> 29);
    return all;
}

}  // namespace
