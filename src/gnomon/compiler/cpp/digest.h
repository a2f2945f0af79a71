// A digest of memory, so that what was made of it is made again once somebody has written it, by whatever means.
#pragma once

namespace {

ALWAYS uint64_t digest(const char* p, int64_t bytes) {
    U a[4] = {};
    const int64_t wide = sizeof(U);
    for (int64_t i = 0; i < bytes; i += 4 * wide) {
        for (int j = 0; j < 4; j++) {
            U w = {};
            const int64_t at = i + j * wide, left = bytes - at;
            if (left >= wide) memcpy(&w, p + at, sizeof w);
            else if (left > 0) memcpy(&w, p + at, (size_t)left);
            a[j] = (a[j] ^ w) * 0x9E3779B1u + 0x7F4A7C15u;
            a[j] ^= a[j] >> 15;
        }
    }
    uint64_t all = (uint64_t)bytes;
    for (int j = 0; j < 4; j++)
        for (int l = 0; l < VW; l++) all = ((all ^ a[j][l]) * 0x9E3779B97F4A7C15u) ^ (all >> 29);
    return all;
}

}  // namespace
