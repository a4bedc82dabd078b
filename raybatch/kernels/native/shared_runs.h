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
    float query[TILE_FLOATS];
    float output[TILE_FLOATS];
    float highest[WIDTH];
    float total[WIDTH];
    int32_t first[WIDTH];
} Tile;

/* A span of one KV head, as numbers and without the gaps between blocks. */
typedef struct {
    float keys[SPAN * HEAD_DIM];
    float values[SPAN * HEAD_DIM];
} Span;

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

/* Add to sums [count, width] the products of numbers with the lanes of a panel, one of num_inputs
   after the other: of row r the numbers r * HEAD_DIM + k, or those of a column, k * HEAD_DIM + r.
   count, width and by_row are constants. */
INLINE void add_products(const int count, const int width, const int by_row, const float *numbers,
                         int64_t num_inputs, const float *panel, float *sums) {
    Lanes kept[MAX_SUMS][2], lanes[2];
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int j = 0; j < width / LANES; j++)
            kept[r][j] = ((const AnyLanes *)(sums + r * width))[j];
    for (int64_t k = 0; k < num_inputs; k++) {
#pragma GCC unroll 2
        for (int j = 0; j < width / LANES; j++)
            lanes[j] = ((const AnyLanes *)(panel + k * width))[j];
        /* a number meets all lanes before the next is read: more do not stay in registers */
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            float number = numbers[by_row ? r * HEAD_DIM + k : k * HEAD_DIM + r];
#pragma GCC unroll 2
            for (int j = 0; j < width / LANES; j++) kept[r][j] += number * lanes[j];
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
#pragma GCC unroll 2
        for (int j = 0; j < width / LANES; j++)
            ((AnyLanes *)(sums + r * width))[j] = kept[r][j];
}

#define ADD(count)                                                                                 \
    for (; (count) * (width / LANES) <= RUN_SUMS && num_rows - done >= (count); done += (count))   \
        add_products(count, width, by_row, numbers + done * (by_row ? HEAD_DIM : 1), num_inputs,   \
                     panel, sums + done * width);

/* The same for any number of rows or columns, as many at once as stay in registers. */
INLINE void add_all(int num_rows, const int width, const int by_row, const float *numbers,
                    int64_t num_inputs, const float *panel, float *sums) {
    int done = 0;
    ADD(16) ADD(8) ADD(6) ADD(4) ADD(2) ADD(1)
}

/* Take in a span whose first position is `start` in the run; width is a constant. */
INLINE void add_span(const int width, Tile *tile, const Span *span, int start, int count,
                     int is_masked) {
    float weights[SPAN * WIDTH], base[WIDTH], kept[WIDTH], sum[WIDTH];
    for (int i = 0; i < count * width; i++) weights[i] = 0.0f;
    add_all(count, width, 1, span->keys, HEAD_DIM, tile->query, weights);
    if (is_masked)
        for (int k = 0; k < count; k++)
            for (int l = 0; l < width; l++)
                if (start + k < tile->first[l]) weights[k * width + l] = -INFINITY;
    for (int l = 0; l < width; l++) base[l] = tile->highest[l];
    for (int k = 0; k < count; k++)
        for (int l = 0; l < width; l++)
            base[l] = weights[k * width + l] > base[l] ? weights[k * width + l] : base[l];
    for (int l = 0; l < width; l++) {
        kept[l] = kept_of(tile->total[l], tile->highest[l], base[l]);
        tile->highest[l] = base[l];
        /* a lane that has seen nothing yet */
        base[l] = base[l] == -INFINITY ? 0.0f : base[l];
        sum[l] = 0.0f;
    }
    for (int k = 0; k < count; k++)
        for (int l = 0; l < width; l++) {
            float weight = exp_of(weights[k * width + l] - base[l]);
            if (is_masked && start + k < tile->first[l]) weight = 0.0f;
            weights[k * width + l] = weight;
            sum[l] += weight;
        }
    for (int l = 0; l < width; l++) tile->total[l] = tile->total[l] * kept[l] + sum[l];
    for (int d = 0; d < HEAD_DIM; d++)
        for (int l = 0; l < width; l++) tile->output[d * width + l] *= kept[l];
    add_all(HEAD_DIM, width, 0, span->values, count, weights, tile->output);
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
    for (int64_t begin = 0; begin < num_heads; begin += MAX_TILES * WIDTH) {
        int num_tiles = 0, counts[MAX_TILES], widths[MAX_TILES];
        for (int64_t b = begin; b < num_heads && num_tiles < MAX_TILES; b += WIDTH, num_tiles++) {
            counts[num_tiles] = (int)least(WIDTH, num_heads - b);
            widths[num_tiles] = counts[num_tiles] > LANES ? WIDTH : LANES;
            open_tile(&tiles[num_tiles], readers, g, b, counts[num_tiles], widths[num_tiles]);
        }
        for (int64_t start = first_seen; start < num_tokens; start += SPAN) {
            int64_t count = least(SPAN, num_tokens - start);
            for (int64_t k = 0; k < count; k++) {
                int64_t place = place_of(blocks, start + k, readers->num_kv_heads, g);
                copy_row(keys + place, span.keys + k * HEAD_DIM);
                copy_row(values + place, span.values + k * HEAD_DIM);
                if (start + k + SPAN >= num_tokens) continue;
                place = place_of(blocks, start + k + SPAN, readers->num_kv_heads, g);
                prefetch(keys + place);
                prefetch(values + place);
            }
            int is_masked = readers->firsts != 0;
            for (int t = 0; t < num_tiles; t++) {
                if (widths[t] == WIDTH)
                    add_span(WIDTH, &tiles[t], &span, (int)start, (int)count, is_masked);
                else
                    add_span(LANES, &tiles[t], &span, (int)start, (int)count, is_masked);
            }
        }
        for (int t = 0; t < num_tiles; t++)
            close_tile(&tiles[t], readers, g, begin + t * WIDTH, counts[t], widths[t]);
    }
}
