/* Linear layers for a few rows: y = x W^T + bias + residual, in bfloat16 with sums in float.

   What a few rows cost is reading the weights, unless reading and multiplying happen at once: so weights lie in the order
   in which they are used, and while one block of them is multiplied the next is asked for. A row's numbers do not depend
   on how many rows there are. For processors that multiply pairs of bfloat16; those with matrix registers multiply 32
   rows with a block at a time. */

#include "matrices.h"

#if defined(HALF) && defined(__AVX512BF16__)

/* Columns of a block, and most rows that are multiplied with it at a time: 24 of 32 registers are sums. */
#define COLUMNS 32
#define ROWS 12

/* packed [columns / 32, rounded up; inner / 2; 32; 2] of weights [columns inner]; inner is even. */
EXPORT void pack(const number *weights, number *packed, int64_t columns, int64_t inner, int threads) {
    int64_t pairs = inner / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < columns; first += COLUMNS) {
        uint32_t *to = (uint32_t *)packed + first * pairs;
        for (int64_t start = 0; start < pairs; start += 16)
            for (int64_t column = 0; column < COLUMNS; column++) {
                const uint32_t *from = (const uint32_t *)(weights + (first + column) * inner);
                int64_t end = start + 16 < pairs ? start + 16 : pairs;
                for (int64_t pair = start; pair < end; pair++)
                    to[pair * COLUMNS + column] = first + column < columns ? from[pair] : 0;
            }
    }
}

static inline __m256i narrowed(__m512 x) {
    __m512i bits = _mm512_castps_si512(x), one = _mm512_set1_epi32(1);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), one);
    __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_set1_epi32(_mm512_srli_epi32(sum, 16), is_nan, 0x7fc0));
}

static inline __m512 read_half(const number *from, __mmask16 which) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(which, from)), 16));
}

/* y[at ..] = sum + bias[column ..] + residual[at ..], of `left` columns and at most 16. */
static inline __attribute__((always_inline)) void finish(__m512 sum, const number *bias, const number *residual,
                                                         number *y, int64_t at, int64_t column, int64_t left) {
    if (left <= 0) return;
    __mmask16 which = left >= 16 ? 0xffff : (__mmask16)((1 << left) - 1);
    if (bias) sum = _mm512_add_ps(sum, read_half(bias + column, which));
    if (residual) sum = _mm512_add_ps(sum, read_half(residual + at, which));
    _mm256_mask_storeu_epi16(y + at, which, narrowed(sum));
}

/* `rows` rows with one block; the lines of `soon` are asked for meanwhile. */
static inline __attribute__((always_inline)) void multiply(const number *x, const number *block, const char *soon,
                                                           int64_t lines, const number *bias, const number *residual,
                                                           number *y, int64_t inner, int64_t columns, int64_t here,
                                                           const int rows) {
    __m512 sums[ROWS][2];
    for (int row = 0; row < rows; row++) sums[row][0] = sums[row][1] = _mm512_setzero_ps();
    int64_t pairs = inner / 2;
    for (int64_t pair = 0; pair < pairs; pair++) {
        const number *at = block + pair * 2 * COLUMNS;
        __m512bh left = (__m512bh)_mm512_loadu_si512(at), right = (__m512bh)_mm512_loadu_si512(at + COLUMNS);
        if (2 * pair < lines) {
            __builtin_prefetch(soon + 128 * pair, 0, 2);
            __builtin_prefetch(soon + 128 * pair + 64, 0, 2);
        }
        for (int row = 0; row < rows; row++) {
            int32_t two;
            memcpy(&two, x + row * inner + 2 * pair, sizeof two);
            __m512bh factor = (__m512bh)_mm512_set1_epi32(two);
            sums[row][0] = _mm512_dpbf16_ps(sums[row][0], left, factor);
            sums[row][1] = _mm512_dpbf16_ps(sums[row][1], right, factor);
        }
    }
    for (int half = 0; half < 2; half++)
        for (int row = 0; row < rows; row++)
            finish(sums[row][half], bias, residual, y, row * columns + 16 * half, 16 * half, here - 16 * half);
}

#ifdef MATRICES
/* Rows that are multiplied with a part of a block while that stays in the first cache, and inner numbers of a part. */
#define MANY 128
#define PART 256

/* Add at most 32 rows' products with inner numbers [from, end) of a block to sums [2 halves, 32, 16]. Of the block that
   comes next, `lines` lines are asked for in each step. */
static inline __attribute__((always_inline)) void multiply_matrices(const number *x, const number *block,
                                                                    const char *soon, int64_t lines, int64_t from,
                                                                    int64_t end, int64_t inner, float *sums,
                                                                    const int is_double) {
    if (from == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 32 * 16, 64);
        if (is_double) {
            _tile_loadd(2, sums + 16 * 16, 64);
            _tile_loadd(3, sums + 48 * 16, 64);
        }
    }
    for (int64_t i = from; i < end; i += 32) {
        const number *at = block + i * COLUMNS;
        for (int64_t line = i; line < i + lines; line++) __builtin_prefetch(soon + 64 * line, 0, 2);
        _tile_loadd(6, at, 4 * COLUMNS);
        _tile_loadd(7, at + 32, 4 * COLUMNS);
        _tile_loadd(4, x + i, 2 * inner);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (is_double) {
            _tile_loadd(5, x + 16 * inner + i, 2 * inner);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 32 * 16, 64);
    if (is_double) {
        _tile_stored(2, sums + 16 * 16, 64);
        _tile_stored(3, sums + 48 * 16, 64);
    }
}

static void linear_matrices(const number *x, const number *packed, const number *bias, const number *residual,
                            number *y, int64_t rows, int64_t columns, int64_t inner, int threads) {
    int64_t blocks = (columns + COLUMNS - 1) / COLUMNS;
#pragma omp parallel num_threads(threads)
    {
        float sums[MANY * COLUMNS] __attribute__((aligned(64)));
        int64_t shaped = 0;
#pragma omp for schedule(static)
        for (int64_t block = 0; block < blocks; block++) {
            int64_t first = block * COLUMNS, here = columns - first < COLUMNS ? columns - first : COLUMNS;
            const number *own = packed + first * inner;
            for (int64_t start = 0; start < rows; start += MANY) {
                int64_t many = rows - start < MANY ? rows - start : MANY, tiles = (many + 31) / 32;
                int64_t lines = start ? 0 : 32 / tiles;
                for (int64_t from = 0; from < inner; from += PART) {
                    int64_t end = from + PART < inner ? from + PART : inner;
                    for (int64_t tile = 0; tile < tiles; tile++) {
                        int64_t count = many - 32 * tile < 32 ? many - 32 * tile : 32;
                        const number *of = x + (start + 32 * tile) * inner;
                        const char *soon = (const char *)(own + COLUMNS * inner) + 64 * tile * lines;
                        float *into = sums + 32 * COLUMNS * tile;
                        if (count != shaped) lay_out(shaped = count);
                        if (count > 16)
                            multiply_matrices(of, own, soon, lines, from, end, inner, into, 1);
                        else
                            multiply_matrices(of, own, soon, lines, from, end, inner, into, 0);
                    }
                }
                for (int64_t i = 0; i < many; i++)
                    for (int half = 0; half < 2; half++)
                        finish(_mm512_load_ps(sums + 32 * COLUMNS * (i / 32) + (32 * half + i % 32) * 16), bias,
                               residual, y, (start + i) * columns + first + 16 * half, first + 16 * half,
                               here - 16 * half);
            }
        }
        if (shaped) _tile_release();
    }
}
#endif

/* x [rows inner]; packed as above; bias [columns] and residual [rows columns], or NULL; y [rows columns]. */
EXPORT void linear(const number *x, const number *packed, const number *bias, const number *residual, number *y,
                   int64_t rows, int64_t columns, int64_t inner, int threads) {
#ifdef MATRICES
    if (inner % 32 == 0 && has_matrices()) {
        linear_matrices(x, packed, bias, residual, y, rows, columns, inner, threads);
        return;
    }
#endif
    int64_t blocks = (columns + COLUMNS - 1) / COLUMNS, pairs = inner / 2;
    int64_t tiles = (rows + ROWS - 1) / ROWS, each = (rows + tiles - 1) / tiles;
    int64_t share = ((2 * pairs + tiles - 1) / tiles + 1) & ~(int64_t)1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t block = 0; block < blocks; block++) {
        int64_t first = block * COLUMNS, here = columns - first < COLUMNS ? columns - first : COLUMNS;
        const number *own = packed + first * inner;
        for (int64_t tile = 0; tile < tiles; tile++) {
            int64_t row = tile * each, count = rows - row < each ? rows - row : each;
            if (count <= 0) break;
            /* Behind the last block lies nothing that is wanted; asking for it does no harm. */
            const char *soon = (const char *)(own + COLUMNS * inner) + 64 * tile * share;
            const number *add = residual ? residual + row * columns + first : NULL;
#define MULTIPLY(n)                                                                                                    \
    case n:                                                                                                            \
        multiply(x + row * inner, own, soon, share, bias ? bias + first : NULL, add, y + row * columns + first, inner, \
                 columns, here, n);                                                                                    \
        break;
            switch (count) {
                MULTIPLY(1)
                MULTIPLY(2)
                MULTIPLY(3)
                MULTIPLY(4)
                MULTIPLY(5)
                MULTIPLY(6)
                MULTIPLY(7)
                MULTIPLY(8)
                MULTIPLY(9)
                MULTIPLY(10)
                MULTIPLY(11)
                MULTIPLY(12)
            }
        }
    }
}

#endif
