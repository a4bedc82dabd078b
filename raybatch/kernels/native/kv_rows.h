/* Rows of 8-bit numbers with a float32 scale behind them, as raybatch/kernels/kv_rows.py has them.
   Plain C whose loops the compiler turns into vectors. */

#ifndef RAYBATCH_KV_ROWS_H
#define RAYBATCH_KV_ROWS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SCALE_BYTES 4
#define LEAST 1e-30f

static inline int64_t row_width(int64_t dim) {
    return (dim + SCALE_BYTES - 1) / SCALE_BYTES * SCALE_BYTES + SCALE_BYTES;
}

static inline float read_scale(const void *row, int64_t dim) {
    float scale;
    memcpy(&scale, (const char *)row + row_width(dim) - SCALE_BYTES, SCALE_BYTES);
    return scale;
}

/* The number of 8 bits of float8_e4m3fn: with its bits where float32 has them, its exponent is 120 too
   low, also where it is the least. The sign comes last, so that a compiler which may change the order
   of products cannot draw the power of two out of a sum, where it would be too large. The bits of
   NaN read as 480: a row with such a number has a scale that is none. */
static inline float read_fp8(uint8_t bits) {
    uint32_t whole = (uint32_t)(bits & 0x7f) << 20;
    float value;
    memcpy(&value, &whole, sizeof(value));
    value *= 0x1p120f;
    memcpy(&whole, &value, sizeof(whole));
    whole |= (uint32_t)(bits & 0x80) << 24;
    memcpy(&value, &whole, sizeof(value));
    return value;
}

/* The nearest 8 bits of a number within -448..448, ties to even. */
static inline uint8_t write_fp8(float value) {
    uint32_t whole;
    memcpy(&whole, &value, sizeof(whole));
    uint32_t sign = (whole >> 24) & 0x80, magnitude = whole & 0x7fffffff;
    uint32_t rounded = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120u << 3);
    uint32_t small = (uint32_t)(int32_t)__builtin_rintf(fabsf(value) * 0x1p9f);
    /* 121 is the exponent of the least number that has one */
    return (uint8_t)((magnitude < (121u << 23) ? small : rounded) | sign);
}

/* The largest magnitude of a row; NaN where a number of it is not finite. */
static inline float highest_of(const float *row, int64_t dim) {
    float highest = 0.0f, probe = 0.0f;
    for (int64_t d = 0; d < dim; d++) {
        float magnitude = fabsf(row[d]);
        highest = magnitude > highest ? magnitude : highest;
        probe += row[d] * 0.0f;
    }
    return highest + probe;
}

static inline float within(float value, float most) {
    value = value > -most ? value : -most;
    return value < most ? value : most;
}

#endif
