/* Attention of many rows over a run of cached positions that all of them read: a span of the run is
   read once for up to MAX_TILES tiles. A tile is a row of lanes, one for each query head of each
   row, so scores are products of keys with a panel of queries, and no sum goes across lanes. What a
   lane gets does not depend on its neighbours. Element, ROW, read_row, scale_of and prefetch are
   those of the pool. */

#define WEIGHT_FORM 0
#include "panels.h"

/* lanes of a tile, and sums of LANES that stay in registers beside them */
#if defined(__AVX2__)
#define WIDTH (2 * LANES)
#define RUN_SUMS MAX_SUMS
#else
#define WIDTH LANES
#define RUN_SUMS 6
#endif
/* positions of a span, whose keys and values stay in the cache for all tiles */
#define SPAN 64
#define TILE_FLOATS (HEAD_DIM * WIDTH)
#define MAX_TILES (TILE_FLOATS < 16384 ? 32768 / TILE_FLOATS : 2)

/* What the lanes of a tile have seen so far, and the first position of the run that each sees. */
typedef struct {
    _Alignas(64) float query[TILE_FLOATS];
    float output[TILE_FLOATS];
    float highest[WIDTH];
    float total[WIDTH];
    int32_t first[WIDTH];
} Tile;

/* Positions start..start + count - 1 of one KV head, as numbers and without the gaps between blocks;
   is_masked where a reader may not see all of them. */
typedef struct {
    _Alignas(64) float keys[SPAN * HEAD_DIM];
    float values[SPAN * HEAD_DIM];
    int start, count, is_masked;
} Span;

/* What a tile makes of a span: scores and then weights [count, lanes], the highest score of each lane
   so far, and the share that is left of what came before. */
typedef struct {
    _Alignas(64) float weights[SPAN * WIDTH];
    float highest[WIDTH];
    float share[WIDTH];
} Work;

INLINE void copy_row(const Element *row, float *numbers) {
    float room[HEAD_DIM], scale = scale_of(row);
    const float *from = read_row(row, room);
    for (int d = 0; d < HEAD_DIM; d++) numbers[d] = from[d] * scale;
}

/* The readers of a run, and where the state of each lies. */
typedef struct {
    const int64_t *rows;
    const int64_t *firsts;
    const float *q;
    int64_t q_stride;
    float *output;
    float *highest;
    float *total;
    int64_t num_kv_heads;
    float scale;
} Readers;

/* the lanes j * LANES and on of a row of numbers */
#define LANES_AT(numbers, j) (((AnyLanes *)(numbers))[j])

INLINE Lanes choose(Whole is_one, Lanes one, Lanes other) {
    return (Lanes)(((Whole)one & is_one) | ((Whole)other & ~is_one));
}

/* exp of scores less the highest, so of numbers up to 0, in fewer steps than exp_of; 0 below -87. What
   one constant for ln 2 leaves out matters in weights alone that are next to nothing. */
INLINE Lanes weights_of(Lanes x) {
    /* numbers up to 0 are cut towards it */
    Whole whole = __builtin_convertvector(x * 1.44269504f - 0.5f, Whole);
    Lanes rest = x - __builtin_convertvector(whole, Lanes) * 0.693147181f;
    /* in an order with few steps that wait for each other */
    Lanes square = rest * rest;
    Lanes upper = square * 1.38145988e-3f + (rest * 8.36871658e-3f + 4.16683890e-2f);
    Lanes sum = square * (square * upper + (rest * 1.66665211e-1f + 0.5f)) + (rest + 1.0f);
    return (Lanes)(((Whole)sum + (whole << 23)) & ~(x < -87.0f));
}

/* Write the sums over k < num_inputs of number r * row_step + k * input_step times lanes k of a panel;
   count and width are constants. */
INLINE void sum_products(const int count, const int width, const float *numbers, int64_t row_step,
                         int64_t input_step, int64_t num_inputs, const float *panel,
                         Lanes sums[][2]) {
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int j = 0; j < width / LANES; j++) sums[r][j] = (Lanes){0};
    for (int64_t k = 0; k < num_inputs; k++) {
        Lanes lanes[2];
#pragma GCC unroll 2
        for (int j = 0; j < width / LANES; j++) lanes[j] = LANES_AT(panel + k * width, j);
        /* a number meets all lanes before the next is read: more do not stay in registers */
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            float number = numbers[r * row_step + k * input_step];
#pragma GCC unroll 2
            for (int j = 0; j < width / LANES; j++) sums[r][j] += number * lanes[j];
        }
    }
}

/* Write the scores of `count` keys from `first` on, and keep the highest ones. */
INLINE void score_keys(const int count, const int width, Tile *tile, const Span *span, int first,
                       Work *work) {
    Lanes sums[MAX_SUMS][2];
    sum_products(count, width, span->keys + first * HEAD_DIM, HEAD_DIM, 1, HEAD_DIM, tile->query,
                 sums);
#pragma GCC unroll 2
    for (int j = 0; j < width / LANES; j++) {
        Lanes highest = LANES_AT(work->highest, j);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            if (span->is_masked) {
                Whole is_hidden = ((const Whole *)tile->first)[j] > span->start + first + r;
                sums[r][j] = choose(is_hidden, (Lanes){0} - INFINITY, sums[r][j]);
            }
            LANES_AT(work->weights + (first + r) * width, j) = sums[r][j];
            highest = choose(sums[r][j] > highest, sums[r][j], highest);
        }
        LANES_AT(work->highest, j) = highest;
    }
}

/* Add weighted values to what is left of the output: `count` numbers of a row from `first` on. */
INLINE void add_values(const int count, const int width, Tile *tile, const Span *span, int first,
                       Work *work) {
    Lanes sums[MAX_SUMS][2];
    sum_products(count, width, span->values + first, 1, HEAD_DIM, span->count, work->weights,
                 sums);
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int j = 0; j < width / LANES; j++) {
            AnyLanes *output = &LANES_AT(tile->output + (first + r) * width, j);
            *output = *output * LANES_AT(work->share, j) + sums[r][j];
        }
}

/* Make weights of scores; the highest is -INFINITY where a lane has seen nothing. */
INLINE void weigh(const int width, Tile *tile, int count, Work *work) {
    for (int j = 0; j < width / LANES; j++) {
        Lanes highest = LANES_AT(work->highest, j), total = LANES_AT(tile->total, j);
        Lanes base = (Lanes)((Whole)highest & (highest != -INFINITY)), sum = {0};
        Lanes share = weights_of(LANES_AT(tile->highest, j) - base);
        for (int k = 0; k < count; k++) {
            Lanes weight = weights_of(LANES_AT(work->weights + k * width, j) - base);
            LANES_AT(work->weights + k * width, j) = weight;
            sum += weight;
        }
        LANES_AT(work->share, j) = share;
        LANES_AT(tile->highest, j) = highest;
        LANES_AT(tile->total, j) = total * share + sum;
    }
}

/* Take `num` keys, or numbers of rows, as many at once as stay in registers. */
#define IN_STEPS(take, num)                                                                        \
    for (int first = 0; first < (num);) {                                                          \
        STEP(take, num, 16) STEP(take, num, 8) STEP(take, num, 6)                                  \
        STEP(take, num, 4) STEP(take, num, 2) STEP(take, num, 1)                                   \
    }
#define STEP(take, num, many)                                                                      \
    for (; (many) * (width / LANES) <= RUN_SUMS && (num) - first >= (many); first += (many))       \
        take(many, width, tile, span, first, &work);

/* Take in a span; width is a constant. */
INLINE void add_span(const int width, Tile *tile, const Span *span) {
    Work work;
    for (int j = 0; j < width / LANES; j++)
        LANES_AT(work.highest, j) = LANES_AT(tile->highest, j);
    IN_STEPS(score_keys, span->count)
    weigh(width, tile, span->count, &work);
    IN_STEPS(add_values, HEAD_DIM)
}

/* Read the queries and the state of the readers' heads from `begin` on, of one KV head. */
static void open_tile(Tile *tile, const Readers *readers, int64_t g, int64_t begin, int count,
                      int width) {
    for (int l = 0; l < width; l++) {
        /* a lane without a head does what the first one does, and is not written back */
        int64_t place = begin + (l < count ? l : 0), i = place / NUM_GROUPED;
        int64_t head = g * NUM_GROUPED + place % NUM_GROUPED;
        int64_t state = readers->rows[i] * readers->num_kv_heads * NUM_GROUPED + head;
        const float *query = readers->q + readers->rows[i] * readers->q_stride + head * HEAD_DIM;
        for (int d = 0; d < HEAD_DIM; d++) {
            tile->query[d * width + l] = query[d] * readers->scale;
            tile->output[d * width + l] = readers->output[state * HEAD_DIM + d];
        }
        tile->highest[l] = readers->highest[state];
        tile->total[l] = readers->total[state];
        tile->first[l] = readers->firsts ? (int32_t)readers->firsts[i] : 0;
    }
}

static void close_tile(const Tile *tile, const Readers *readers, int64_t g, int64_t begin,
                       int count, int width) {
    for (int l = 0; l < count; l++) {
        int64_t i = (begin + l) / NUM_GROUPED, n = (begin + l) % NUM_GROUPED;
        int64_t state = (readers->rows[i] * readers->num_kv_heads + g) * NUM_GROUPED + n;
        for (int d = 0; d < HEAD_DIM; d++)
            readers->output[state * HEAD_DIM + d] = tile->output[d * width + l];
        readers->highest[state] = tile->highest[l];
        readers->total[state] = tile->total[l];
    }
}

/* Where the row of a position of the run lies in the pool. */
static inline int64_t place_of(const int64_t *blocks, int64_t position, int64_t num_kv_heads,
                               int64_t g) {
    int64_t block = blocks[position / BLOCK_SIZE];
    return ((block * num_kv_heads + g) * BLOCK_SIZE + position % BLOCK_SIZE) * ROW;
}

/* Add a run of num_tokens positions to the state of its num_rows readers, for one KV head. */
static void add_run(const Readers *readers, int64_t num_rows, const Element *keys,
                    const Element *values, const int64_t *blocks, int64_t num_tokens, int64_t g) {
    const int64_t num_heads = num_rows * NUM_GROUPED;
    /* what no reader sees is not read */
    int64_t first_seen = readers->firsts ? num_tokens : 0;
    for (int64_t i = 0; readers->firsts && i < num_rows; i++)
        first_seen = least(first_seen, readers->firsts[i]);
    Tile tiles[MAX_TILES];
    Span span;
    span.is_masked = readers->firsts != 0;
    for (int64_t begin = 0; begin < num_heads; begin += MAX_TILES * WIDTH) {
        int num_tiles = 0, counts[MAX_TILES], widths[MAX_TILES];
        for (int64_t b = begin; b < num_heads && num_tiles < MAX_TILES; b += WIDTH, num_tiles++) {
            counts[num_tiles] = (int)least(WIDTH, num_heads - b);
            widths[num_tiles] = counts[num_tiles] > LANES ? WIDTH : LANES;
            open_tile(&tiles[num_tiles], readers, g, b, counts[num_tiles], widths[num_tiles]);
        }
        for (int64_t start = first_seen; start < num_tokens; start += SPAN) {
            span.start = (int)start;
            span.count = (int)least(SPAN, num_tokens - start);
            for (int64_t k = 0; k < span.count; k++) {
                int64_t place = place_of(blocks, start + k, readers->num_kv_heads, g);
                copy_row(keys + place, span.keys + k * HEAD_DIM);
                copy_row(values + place, span.values + k * HEAD_DIM);
                if (start + k + SPAN >= num_tokens) continue;
                place = place_of(blocks, start + k + SPAN, readers->num_kv_heads, g);
                prefetch(keys + place);
                prefetch(values + place);
            }
            for (int t = 0; t < num_tiles; t++) {
                if (widths[t] == WIDTH)
                    add_span(WIDTH, &tiles[t], &span);
                else
                    add_span(LANES, &tiles[t], &span);
            }
        }
        for (int t = 0; t < num_tiles; t++)
            close_tile(&tiles[t], readers, g, begin + t * WIDTH, counts[t], widths[t]);
    }
}
