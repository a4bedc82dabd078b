/* The experts of a mixture of experts on float32 rows, few each, with weights in panels.

   A panel holds all inputs of UP_WIDTH (gate and up) or DOWN_WIDTH (down) outputs, one input after the
   other, so that it is read in the order in which it lies. The widths are given where this is compiled,
   on the host that runs it. The sums of several rows stay in registers while a panel goes by. */

#include <stdint.h>
#include <string.h>

#include "exponential.h"
#include "panels.h"

MULTIPLY_ROWS(multiply_up, UP_WIDTH)
MULTIPLY_ROWS(multiply_down, DOWN_WIDTH)

/* Multiply sums of num_rows rows by the scales of their outputs; null leaves them. */
INLINE void scale(int num_rows, const int width, float *sums, const float *scales) {
    if (!scales) return;
    for (int r = 0; r < num_rows; r++)
        for (int j = 0; j < width; j++) sums[r * width + j] *= scales[j];
}

/* hidden[r] = silu(gate) * up of rows[r] from output `first` on, for rows of one expert; the panel and
   the scales are those from there on. */
static void gate(int num_rows, const float *const *rows, int64_t model_dim, int64_t ffn_dim,
                 const Weight *panel, const float *scales, float *hidden, int64_t first) {
    float gates[MAX_ROWS * UP_WIDTH], ups[MAX_ROWS * UP_WIDTH];
    multiply_up(num_rows, rows, model_dim, panel, gates);
    multiply_up(num_rows, rows, model_dim, panel + ffn_dim * model_dim, ups);
    scale(num_rows, UP_WIDTH, gates, scales);
    scale(num_rows, UP_WIDTH, ups, scales ? scales + ffn_dim : scales);
    for (int i = 0; i < num_rows * UP_WIDTH; i++)
        gates[i] = gates[i] / (1.0f + exp_of(-gates[i])) * ups[i];
    for (int r = 0; r < num_rows; r++)
        memcpy(hidden + r * ffn_dim + first, gates + r * UP_WIDTH, sizeof(float) * UP_WIDTH);
}

/* x [T, M] with x_stride floats from token to token; gate_up [E, 2F / UP_WIDTH, M, UP_WIDTH], gate
   first; down [E, M / DOWN_WIDTH, F, DOWN_WIDTH]. Expert e has the rows starts[e]..starts[e + 1] - 1:
   row i is token tokens[i], and its output goes to outputs[targets[i]], [N, M]. hidden has room for
   the most rows of one expert, times F. Weights that are bytes have scales [E, 2F] and [E, M], null
   for others. */
void compute_experts(const float *x, int64_t x_stride, const Weight *gate_up, const Weight *down,
                     const float *up_scales, const float *down_scales, const int64_t *tokens, const int64_t *targets, const int64_t *starts,
                     int64_t num_experts, int64_t model_dim, int64_t ffn_dim, float *hidden,
                     float *outputs) {
    const float *rows[MAX_ROWS];
    float sums[MAX_ROWS * DOWN_WIDTH];
    for (int64_t e = 0; e < num_experts; e++) {
        const Weight *up = gate_up + e * 2 * ffn_dim * model_dim;
        const Weight *out = down + e * ffn_dim * model_dim;
        int64_t count = starts[e + 1] - starts[e];
        for (int64_t first = 0; first < ffn_dim; first += UP_WIDTH) {
            for (int64_t done = 0; done < count; done += MAX_ROWS) {
                int num_rows = (int)least(MAX_ROWS, count - done);
                for (int r = 0; r < num_rows; r++)
                    rows[r] = x + tokens[starts[e] + done + r] * x_stride;
                gate(num_rows, rows, model_dim, ffn_dim, up + first * model_dim,
                     up_scales ? up_scales + e * 2 * ffn_dim + first : 0, hidden + done * ffn_dim,
                     first);
            }
        }
        for (int64_t first = 0; first < model_dim; first += DOWN_WIDTH) {
            for (int64_t done = 0; done < count; done += MAX_ROWS) {
                int num_rows = (int)least(MAX_ROWS, count - done);
                for (int r = 0; r < num_rows; r++) rows[r] = hidden + (done + r) * ffn_dim;
                multiply_down(num_rows, rows, ffn_dim, out + first * ffn_dim, sums);
                scale(num_rows, DOWN_WIDTH, sums,
                      down_scales ? down_scales + e * model_dim + first : 0);
                for (int r = 0; r < num_rows; r++)
                    memcpy(outputs + targets[starts[e] + done + r] * model_dim + first,
                           sums + r * DOWN_WIDTH, sizeof(float) * DOWN_WIDTH);
            }
        }
    }
}
