/* exp in a form that compilers turn into vectors, within 2 units of the last place where the processor
   multiplies and adds in one (after Cephes' expf): an integer power of two, and a polynomial for the rest. Arguments beyond -87 and 88 count as
   these. NaN stays NaN, so that broken weights are seen. */

#ifndef RAYBATCH_EXPONENTIAL_H
#define RAYBATCH_EXPONENTIAL_H

#include <stdint.h>

static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float whole = __builtin_rintf(x * 1.44269504f);
    /* ln 2 in two parts, so that the product with the first is exact; a compiler that may change the
       order of sums would join them */
#ifdef __FP_FAST_FMAF
    float rest = __builtin_fmaf(-whole, 0.693359375f, x);
    rest = __builtin_fmaf(whole, 2.12194440e-4f, rest);
#else
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
#endif
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    union {
        int32_t bits;
        float value;
    } power = {.bits = ((int32_t)whole + 127) << 23};
    return sum * power.value;
}

#endif
