/* Attention of one token per sequence over its blocks of the KV pool, in float32.

   Compiled on the host that runs it, for one shape: HEAD_DIM, BLOCK_SIZE, and NUM_GROUPED query
   heads per KV head; KV_FORM says what the pool holds: 0 float32, 1 int8 and 2 float8_e4m3fn with
   scales. Plain C whose loops the compiler turns into vectors. */

#include <math.h>
#include <stdint.h>

#include "kv_rows.h"
#include "softmax.h"

#if KV_FORM == 0

typedef float Element;
#define ROW HEAD_DIM

/* The numbers of a row, which are to be multiplied by its scale; room is for those to be made. */
static inline const float *read_row(const Element *row, float *room) {
    (void)room;
    return row;
}

static inline float scale_of(const Element *row) {
    (void)row;
    return 1.0f;
}

#else

#if KV_FORM == 1
typedef int8_t Element;
#define READ(x) ((float)(x))
#else
typedef uint8_t Element;
#define READ(x) read_fp8(x)
#endif
#define ROW row_width(HEAD_DIM)

static inline const float *read_row(const Element *row, float *room) {
    for (int d = 0; d < HEAD_DIM; d++) room[d] = READ(row[d]);
    return room;
}

static inline float scale_of(const Element *row) { return read_scale(row, HEAD_DIM); }

#endif

static inline void prefetch(const Element *row) {
    for (int d = 0; d < ROW; d += 64 / (int)sizeof(Element)) __builtin_prefetch(row + d, 0, 2);
}

#include "shared_runs.h"

/* What the query heads of one KV head have seen so far. */
typedef struct {
    float query[NUM_GROUPED][HEAD_DIM];
    float output[NUM_GROUPED][HEAD_DIM];
    float highest[NUM_GROUPED];
    float total[NUM_GROUPED];
} State;

/* Take in positions first..stop-1 of one block; next is what will be read after it. */
static void add_block(State *state, const Element *keys, const Element *values,
                      const Element *next, int64_t first, int64_t stop) {
    float weights[NUM_GROUPED][BLOCK_SIZE], room[HEAD_DIM];
    for (int64_t j = first; j < stop; j++) {
        const float *key = read_row(keys + j * ROW, room);
        float scale = scale_of(keys + j * ROW);
        prefetch(values + j * ROW);
        for (int n = 0; n < NUM_GROUPED; n++) {
            float score = 0.0f;
            for (int d = 0; d < HEAD_DIM; d++) score += state->query[n][d] * key[d];
            weights[n][j] = score * scale;
        }
    }
    for (int n = 0; n < NUM_GROUPED; n++) {
        float highest = state->highest[n];
        for (int64_t j = first; j < stop; j++)
            highest = weights[n][j] > highest ? weights[n][j] : highest;
        float kept = kept_of(state->total[n], state->highest[n], highest);
        float sum = 0.0f;
        for (int64_t j = first; j < stop; j++) {
            weights[n][j] = exp_of(weights[n][j] - highest);
            sum += weights[n][j];
        }
        state->highest[n] = highest;
        state->total[n] = state->total[n] * kept + sum;
        for (int d = 0; d < HEAD_DIM; d++) state->output[n][d] *= kept;
    }
    for (int64_t j = first; j < stop; j++) {
        const float *value = read_row(values + j * ROW, room);
        float scale = scale_of(values + j * ROW);
        prefetch(next + j * ROW);
        for (int n = 0; n < NUM_GROUPED; n++) {
            float weight = weights[n][j] * scale;
            for (int d = 0; d < HEAD_DIM; d++) state->output[n][d] += weight * value[d];
        }
    }
}

/* q [S, H, D] with q_stride floats from sequence to sequence; keys and values [N, G, B, R]; output
   [S, H, D]; lse and totals [S, H], of which totals is room alone. Sequence s reads
   blocks[offsets[s]..offsets[s + 1]], of each the positions firsts..stops-1; a null firsts stands
   for zeros. Before, run r of run_tokens[r] positions, in run_blocks from run_starts[r] on, is
   read by rows[row_starts[r]..row_starts[r + 1]], each from its seen on (null: all). One without
   positions gets an output of 0 and a log-sum-exp of -INFINITY. */
void attend_decode(const float *q, int64_t q_stride, const Element *keys, const Element *values,
                   float *output, float *lse, float *totals, const int64_t *blocks,
                   const int64_t *firsts, const int64_t *stops, const int64_t *offsets,
                   const int64_t *rows, const int64_t *seen, const int64_t *row_starts,
                   const int64_t *run_blocks, const int64_t *run_starts, const int64_t *run_tokens,
                   int64_t num_runs, int64_t num_sequences, int64_t num_kv_heads, float scale) {
    const int64_t tile = (int64_t)BLOCK_SIZE * ROW;
    for (int64_t i = 0; i < num_sequences * num_kv_heads * NUM_GROUPED; i++) {
        lse[i] = -INFINITY;
        totals[i] = 0.0f;
        for (int d = 0; d < HEAD_DIM; d++) output[i * HEAD_DIM + d] = 0.0f;
    }
    for (int64_t r = 0; r < num_runs; r++) {
        int64_t begin = row_starts[r];
        Readers readers = {rows + begin, seen ? seen + begin : 0, q, q_stride, output, lse, totals,
                           num_kv_heads, scale};
        for (int64_t g = 0; g < num_kv_heads; g++)
            add_run(&readers, row_starts[r + 1] - begin, keys, values, run_blocks + run_starts[r],
                    run_tokens[r], g);
    }
    for (int64_t s = 0; s < num_sequences; s++) {
        for (int64_t g = 0; g < num_kv_heads; g++) {
            int64_t row = (s * num_kv_heads + g) * NUM_GROUPED;
            State state;
            for (int n = 0; n < NUM_GROUPED; n++) {
                const float *query = q + s * q_stride + (g * NUM_GROUPED + n) * HEAD_DIM;
                state.highest[n] = lse[row + n];
                state.total[n] = totals[row + n];
                for (int d = 0; d < HEAD_DIM; d++) {
                    state.query[n][d] = query[d] * scale;
                    state.output[n][d] = output[(row + n) * HEAD_DIM + d];
                }
            }
            for (int64_t i = offsets[s]; i < offsets[s + 1]; i++) {
                int64_t first = firsts ? firsts[i] : 0;
                if (first >= stops[i]) continue;
                int64_t place = (blocks[i] * num_kv_heads + g) * tile;
                int64_t next = i + 1 < offsets[s + 1] ? blocks[i + 1] : blocks[i];
                add_block(&state, keys + place, values + place,
                          keys + (next * num_kv_heads + g) * tile, first, stops[i]);
            }
            for (int n = 0; n < NUM_GROUPED; n++) {
                float share = share_of(state.total[n]);
                for (int d = 0; d < HEAD_DIM; d++)
                    output[(row + n) * HEAD_DIM + d] = state.output[n][d] * share;
                lse[row + n] = log_sum_exp_of(state.total[n], state.highest[n]);
            }
        }
    }
}
