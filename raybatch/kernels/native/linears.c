/* Dense linears in float32 with weights in panels of WIDTH outputs, given where this is compiled.

   All rows go over one panel after the other, which the processor's cache keeps for so long. Weights
   that are bytes have a scale for each output, null for others. */

#include <stdint.h>

#include "exponential.h"
#include "panels.h"

MULTIPLY_ROWS(multiply_rows, WIDTH)

/* Point at up to MAX_ROWS of num_rows rows from `first` on, and return at how many. */
static int point_at(const float **rows, const float *x, int64_t x_stride, int64_t first,
                    int64_t num_rows) {
    int count = (int)least(MAX_ROWS, num_rows - first);
    for (int r = 0; r < count; r++) rows[r] = x + (first + r) * x_stride;
    return count;
}

/* What becomes of the sum of one output: its scale and bias, each unless it is null. */
INLINE float finish(float sum, const float *scales, const float *bias, int64_t output) {
    if (scales) sum *= scales[output];
    if (bias) sum += bias[output];
    return sum;
}

/* out[r] = x[r] times the panels, plus the bias unless it is null, plus out[r] where it adds;
   x [T, in] and out [T, num_outputs] with so many floats from row to row; the last panel may hold
   more outputs than are wanted. */
void linear(const float *x, int64_t x_stride, const Weight *panels, const float *scales,
            const float *bias, float *out, int64_t out_stride, int64_t num_rows, int64_t num_inputs,
            int64_t num_outputs, int64_t adds) {
    const float *rows[MAX_ROWS];
    float sums[MAX_ROWS * WIDTH];
    for (int64_t first = 0; first < num_outputs; first += WIDTH) {
        int64_t width = least(WIDTH, num_outputs - first);
        for (int64_t done = 0; done < num_rows; done += MAX_ROWS) {
            int count = point_at(rows, x, x_stride, done, num_rows);
            multiply_rows(count, rows, num_inputs, panels + first * num_inputs, sums);
            for (int r = 0; r < count; r++) {
                float *to = out + (done + r) * out_stride + first;
                const float *sum = sums + r * WIDTH;
                for (int64_t j = 0; j < width; j++) {
                    float value = finish(sum[j], scales, bias, first + j);
                    to[j] = adds ? to[j] + value : value;
                }
            }
        }
    }
}

/* hidden[r] = silu(gate) * up, [T, F], with panels of gate [F / WIDTH, in, WIDTH], then of up, and
   a bias of both, which may be null; F is a multiple of WIDTH. */
void gated_linear(const float *x, int64_t x_stride, const Weight *panels, const float *scales,
                  const float *bias, float *hidden, int64_t num_rows, int64_t num_inputs,
                  int64_t ffn_dim) {
    const float *rows[MAX_ROWS];
    float gates[MAX_ROWS * WIDTH], ups[MAX_ROWS * WIDTH];
    for (int64_t first = 0; first < ffn_dim; first += WIDTH) {
        const Weight *gate = panels + first * num_inputs, *up = gate + ffn_dim * num_inputs;
        for (int64_t done = 0; done < num_rows; done += MAX_ROWS) {
            int count = point_at(rows, x, x_stride, done, num_rows);
            multiply_rows(count, rows, num_inputs, gate, gates);
            multiply_rows(count, rows, num_inputs, up, ups);
            for (int r = 0; r < count; r++) {
                float *to = hidden + (done + r) * ffn_dim + first;
                for (int j = 0; j < WIDTH; j++) {
                    float g = finish(gates[r * WIDTH + j], scales, bias, first + j);
                    float u = finish(ups[r * WIDTH + j], scales, bias, ffn_dim + first + j);
                    to[j] = g / (1.0f + exp_of(-g)) * u;
                }
            }
        }
    }
}
