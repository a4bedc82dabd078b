/* Products of rows with a panel: all inputs of WIDTH outputs, one input after the other.

   A panel is read in the order in which it lies, once for up to MAX_ROWS rows, whose sums stay in
   registers while it goes by. Its weights are float32, or bytes that become floats in a register:
   WEIGHT_FORM says which, where this is compiled. */

#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

/* values of WEIGHT_FORM */
#define FLOAT32 0
#define INT8 1
#define FP8 2

/* floats of one register, and sums that fit the registers beside a panel's row */
#if defined(__AVX512F__)
#define LANES 16
#define MAX_SUMS 24
#else
#define LANES 8
#define MAX_SUMS 12
#endif
#define MAX_ROWS 24

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef float AnyLanes __attribute__((vector_size(4 * LANES), aligned(4)));

#define INLINE static inline __attribute__((always_inline))

#if WEIGHT_FORM == FLOAT32
typedef float Weight;
INLINE Lanes widen(const Weight *from) { return *(const AnyLanes *)from; }
#else
/* LANES bytes as 32-bit numbers; compilers make the generic form one byte at a time */
INLINE Whole widen_bytes(const void *from) {
#if defined(__AVX512F__)
    return (Whole)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (Whole)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    Whole numbers;
    for (int j = 0; j < LANES; j++) numbers[j] = ((const int8_t *)from)[j];
    return numbers;
#endif
}

INLINE Lanes to_floats(Whole numbers) {
#if defined(__AVX512F__)
    return (Lanes)_mm512_cvtepi32_ps((__m512i)numbers);
#elif defined(__AVX2__)
    return (Lanes)_mm256_cvtepi32_ps((__m256i)numbers);
#else
    Lanes floats;
    for (int j = 0; j < LANES; j++) floats[j] = (float)numbers[j];
    return floats;
#endif
}

#if WEIGHT_FORM == INT8
typedef int8_t Weight;
INLINE Lanes widen(const Weight *from) { return to_floats(widen_bytes(from)); }
#else
typedef uint8_t Weight;
/* e4m3 without infinity: 4 bits of exponent and 3 of mantissa go to their places in a float32, and
   the product makes up for the other bias of the exponent, denormal numbers included. The sign comes
   last, so that a compiler which may change the order of products cannot draw the power of two to
   the rows, where it would be too large. */
INLINE Lanes widen(const Weight *from) {
    Whole bits = widen_bytes(from);
    Lanes size = (Lanes)((bits & 0x7f) << 20) * 0x1p120f;
    return (Lanes)((Whole)size | (bits & INT32_MIN));
}
#endif
#endif

/* Write rows[r] times a panel to sums[r * width + j]; the first two arguments are constants. */
INLINE void multiply(const int num_rows, const int width, const float *const *rows,
                     int64_t num_inputs, const Weight *panel, float *sums) {
    Lanes kept[num_rows][width / LANES];
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < width / LANES; j++) kept[r][j] = (Lanes){0};
    for (int64_t k = 0; k < num_inputs; k++) {
#pragma GCC unroll 8
        for (int j = 0; j < width / LANES; j++) {
            Lanes weights = widen(panel + k * width + j * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < num_rows; r++) kept[r][j] += rows[r][k] * weights;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 8
        for (int j = 0; j < width / LANES; j++)
            ((AnyLanes *)(sums + r * width))[j] = kept[r][j];
}

/* Define `name`, the same for up to MAX_ROWS rows: as many at once as have room, then fewer. */
#define MULTIPLY_ROWS(name, width)                                                            \
    static void name(int num_rows, const float *const *rows, int64_t num_inputs,              \
                     const Weight *panel, float *sums) {                                      \
        int done = 0;                                                                         \
        TAKE(8, width) TAKE(6, width) TAKE(4, width)                                          \
        TAKE(3, width) TAKE(2, width) TAKE(1, width)                                          \
    }
#define TAKE(count, width)                                                                    \
    while ((count) * ((width) / LANES) <= MAX_SUMS && num_rows - done >= (count)) {           \
        multiply(count, width, rows + done, num_inputs, panel, sums + done * (width));        \
        done += count;                                                                        \
    }

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }
