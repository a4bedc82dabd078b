/* Products of rows with a panel: all inputs of WIDTH outputs, one input after the other.

   A panel is read in the order in which it lies, once for up to MAX_ROWS rows, whose sums stay in
   registers while it goes by. */

#include <stdint.h>

/* floats of one register, and sums that fit the registers beside a panel's row */
#if defined(__AVX512F__)
#define LANES 16
#define MAX_SUMS 24
#else
#define LANES 8
#define MAX_SUMS 12
#endif
#define MAX_ROWS 8

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef float AnyLanes __attribute__((vector_size(4 * LANES), aligned(4)));

#define INLINE static inline __attribute__((always_inline))

/* Write rows[r] times a panel to sums[r * width + j]; the first two arguments are constants. */
INLINE void multiply(const int num_rows, const int width, const float *const *rows,
                     int64_t num_inputs, const float *panel, float *sums) {
    Lanes kept[num_rows][width / LANES];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < width / LANES; j++) kept[r][j] = (Lanes){0};
    for (int64_t k = 0; k < num_inputs; k++) {
#pragma GCC unroll 8
        for (int r = 0; r < num_rows; r++) {
            float value = rows[r][k];
#pragma GCC unroll 8
            for (int j = 0; j < width / LANES; j++)
                kept[r][j] += value * ((const AnyLanes *)(panel + k * width))[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < width / LANES; j++)
            ((AnyLanes *)(sums + r * width))[j] = kept[r][j];
}

/* Define `name`, the same for up to MAX_ROWS rows: as many at once as have room, then halves. */
#define MULTIPLY_ROWS(name, width)                                                            \
    static void name(int num_rows, const float *const *rows, int64_t num_inputs,              \
                     const float *panel, float *sums) {                                       \
        int done = 0;                                                                         \
        TAKE(8, width) TAKE(4, width) TAKE(2, width) TAKE(1, width)                           \
    }
#define TAKE(count, width)                                                                    \
    while ((count) * ((width) / LANES) <= MAX_SUMS && num_rows - done >= (count)) {           \
        multiply(count, width, rows + done, num_inputs, panel, sums + done * (width));        \
        done += count;                                                                        \
    }

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }
