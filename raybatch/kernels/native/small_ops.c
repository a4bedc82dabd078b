/* Steps between the products of a layer, in float32: each goes over its rows once, where torch goes
   over them once for every factor. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "kv_rows.h"

/* outputs [T, H, D] = x [T, H, D], each row of D over its root mean square, times its head's weight;
   strides are floats from token to token, from head to head, and from weight to weight. */
void rms_norm(const float *x, int64_t token_stride, int64_t head_stride, const float *weights,
              int64_t weight_stride, float eps, float *outputs, int64_t num_tokens,
              int64_t num_heads, int64_t dim) {
    for (int64_t t = 0; t < num_tokens; t++) {
        for (int64_t h = 0; h < num_heads; h++) {
            const float *row = x + t * token_stride + h * head_stride;
            const float *weight = weights + h * weight_stride;
            float *output = outputs + (t * num_heads + h) * dim;
            float sum = 0.0f;
            for (int64_t d = 0; d < dim; d++) sum += row[d] * row[d];
            float scale = 1.0f / sqrtf(sum / (float)dim + eps);
            for (int64_t d = 0; d < dim; d++) output[d] = row[d] * scale * weight[d];
        }
    }
}

/* Turn every pair of dimensions of x [T, H, D] in place; table [T, D / 2] holds cosine and sine. */
void rotate(float *x, int64_t token_stride, const float *table, int64_t num_tokens,
            int64_t num_heads, int64_t dim) {
    for (int64_t t = 0; t < num_tokens; t++) {
        const float *turns = table + t * dim;
        for (int64_t h = 0; h < num_heads; h++) {
            float *row = x + t * token_stride + h * dim;
            for (int64_t d = 0; d < dim; d += 2) {
                float first = row[d], second = row[d + 1];
                row[d] = first * turns[d] - second * turns[d + 1];
                row[d + 1] = first * turns[d + 1] + second * turns[d];
            }
        }
    }
}

/* Copy keys or values [T, G, D] to their slots of the pool [N, G, B, D]. */
void store_rows(const float *rows, int64_t token_stride, float *pool, const int64_t *blocks,
                const int64_t *offsets, int64_t num_tokens, int64_t num_kv_heads,
                int64_t block_size, int64_t dim) {
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t g = 0; g < num_kv_heads; g++)
            memcpy(pool + ((blocks[t] * num_kv_heads + g) * block_size + offsets[t]) * dim,
                   rows + t * token_stride + g * dim, sizeof(float) * (size_t)dim);
}

/* Like store_rows, for a pool [N, G, B, R] of 8 bits with scales; rows become what it gives back. */
#define STORE(NAME, ELEMENT, LARGEST, WRITE, READ)                                                  \
    void NAME(float *rows, int64_t token_stride, ELEMENT *pool, const int64_t *blocks,              \
              const int64_t *offsets, int64_t num_tokens, int64_t num_kv_heads, int64_t block_size, \
              int64_t dim) {                                                                        \
        const int64_t width = row_width(dim);                                                       \
        for (int64_t t = 0; t < num_tokens; t++) {                                                  \
            for (int64_t g = 0; g < num_kv_heads; g++) {                                            \
                float *row = rows + t * token_stride + g * dim;                                     \
                ELEMENT *stored =                                                                   \
                    pool + ((blocks[t] * num_kv_heads + g) * block_size + offsets[t]) * width;      \
                float highest = highest_of(row, dim), scale = highest * (1.0f / LARGEST);           \
                float inverse = LARGEST / (highest > LEAST ? highest : LEAST);                      \
                for (int64_t d = 0; d < dim; d++) {                                                 \
                    stored[d] = WRITE(within(row[d] * inverse, LARGEST));                           \
                    row[d] = READ(stored[d]) * scale;                                               \
                }                                                                                   \
                memcpy((char *)stored + width - SCALE_BYTES, &scale, SCALE_BYTES);                  \
            }                                                                                       \
        }                                                                                           \
    }

#define WRITE_INT8(x) ((int8_t)__builtin_rintf(x))
#define READ_INT8(x) ((float)(x))

STORE(store_int8, int8_t, 127.0f, WRITE_INT8, READ_INT8)
STORE(store_fp8, uint8_t, 448.0f, write_fp8, read_fp8)
