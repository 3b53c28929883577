/* Gradients of weights: float32 sums that many rows of bfloat16 are added to.

   Matrix registers multiply 32 rows, each with its inner numbers in order, by 32 columns, in pairs of inner numbers
   [inner / 2, 16, 2]; here inner numbers are positions. Both factors are laid out so first. Where there are none, a vector
   of pairs is multiplied with one pair at a time, and both factors are [inner / 2, 32, 2]. Every extent is a multiple of
   32. */

#include <omp.h>

#include "matrices.h"

#if defined(HALF) && defined(__AVX512BF16__)

#define BLOCK 32
/* Numbers of a block of 32 by 32: two tiles. */
#define TILES 1024
/* Blocks of outputs that a thread lays out at a time, and blocks of positions that are multiplied at a time. */
#define BLOCKS 4
#define STEPS 8

/* Outputs that are multiplied at a time without matrix registers: two of 32 registers are inputs, 16 are sums. */
#define FEW 8

/* 16 rows of 16 pairs become 16 columns. */
static inline __attribute__((always_inline)) void turn_round(__m512i *rows) {
    __m512i half[16];
    for (int i = 0; i < 16; i += 2) {
        half[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        half[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(half[i + j], half[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(half[i + j], half[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        __m512i even = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88);
        __m512i odd = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
        __m512i even_too = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
        __m512i odd_too = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
        half[i] = _mm512_shuffle_i32x4(even, even_too, 0x88);
        half[i + 4] = _mm512_shuffle_i32x4(odd, odd_too, 0x88);
        half[i + 8] = _mm512_shuffle_i32x4(even, even_too, 0xdd);
        half[i + 12] = _mm512_shuffle_i32x4(odd, odd_too, 0xdd);
    }
    memcpy(rows, half, sizeof half);
}

/* A block of 32 positions `apart` apart, as two tiles: of pairs of positions or, turned round, of outputs. Or in pairs of
   positions whose 32 columns lie together. */
static inline __attribute__((always_inline)) void lay(const number *from, int64_t apart, const int is_tiled,
                                                      const int turns, number *to) {
    __m512i tiles[2][16];
    __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36,
                                   4, 35, 3, 34, 2, 33, 1, 32, 0);
    __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    for (int i = 0; i < 16; i++) {
        __m512i even = _mm512_loadu_si512(from + 2 * i * apart), odd = _mm512_loadu_si512(from + (2 * i + 1) * apart);
        tiles[0][i] = _mm512_permutex2var_epi16(even, low, odd);
        tiles[1][i] = _mm512_permutex2var_epi16(even, high, odd);
    }
    for (int half = 0; half < 2; half++) {
        if (turns) turn_round(tiles[half]);
        for (int i = 0; i < 16; i++)
            _mm512_storeu_si512(is_tiled ? to + half * (TILES / 2) + 32 * i : to + 64 * i + 32 * half, tiles[half][i]);
    }
}

/* Add products over `steps` blocks of positions to a block of sums. is_new: nothing is in it. The block of sums at `next`
   is asked for meanwhile. */
static inline void add_pairs(const number *outputs, const number *inputs, int64_t steps, float *sums, int64_t apart,
                             int is_new, const float *next) {
    for (int64_t first = 0; first < BLOCK; first += FEW) {
        __m512 found[FEW][2];
        for (int i = 0; i < FEW; i++) {
            float *own = sums + (first + i) * apart;
            if (next) {
                __builtin_prefetch(next + (first + i) * apart, 1, 2);
                __builtin_prefetch(next + (first + i) * apart + 16, 1, 2);
            }
            found[i][0] = is_new ? _mm512_setzero_ps() : _mm512_loadu_ps(own);
            found[i][1] = is_new ? _mm512_setzero_ps() : _mm512_loadu_ps(own + 16);
        }
        for (int64_t pair = 0; pair < 16 * steps; pair++) {
            const number *at = inputs + 2 * BLOCK * pair, *of = outputs + 2 * (BLOCK * pair + first);
            __m512bh left = (__m512bh)_mm512_loadu_si512(at), right = (__m512bh)_mm512_loadu_si512(at + BLOCK);
            for (int i = 0; i < FEW; i++) {
                int32_t two;
                memcpy(&two, of + 2 * i, sizeof two);
                __m512bh factor = (__m512bh)_mm512_set1_epi32(two);
                found[i][0] = _mm512_dpbf16_ps(found[i][0], left, factor);
                found[i][1] = _mm512_dpbf16_ps(found[i][1], right, factor);
            }
        }
        for (int i = 0; i < FEW; i++) {
            _mm512_storeu_ps(sums + (first + i) * apart, found[i][0]);
            _mm512_storeu_ps(sums + (first + i) * apart + 16, found[i][1]);
        }
    }
}

#ifdef MATRICES
/* The same by matrix registers. */
static inline void add_tiles(const number *outputs, const number *inputs, int64_t steps, float *sums, int64_t apart,
                             int is_new, const float *next) {
    float *below = sums + 16 * apart;
    if (is_new) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 4 * apart);
        _tile_loadd(1, sums + 16, 4 * apart);
        _tile_loadd(2, below, 4 * apart);
        _tile_loadd(3, below + 16, 4 * apart);
    }
    for (int64_t step = 0; step < steps; step++) {
        for (int i = 4 * step; next && i < 4 * step + 4; i++) {
            __builtin_prefetch(next + i * apart, 1, 2);
            __builtin_prefetch(next + i * apart + 16, 1, 2);
        }
        _tile_loadd(6, inputs + step * TILES, 64);
        _tile_loadd(4, outputs + step * TILES, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, inputs + step * TILES + TILES / 2, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, outputs + step * TILES + TILES / 2, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 4 * apart);
    _tile_stored(1, sums + 16, 4 * apart);
    _tile_stored(2, below, 4 * apart);
    _tile_stored(3, below + 16, 4 * apart);
}
#endif

/* `add_gradient`, by matrix registers or not; always_inline, so that each way is compiled for itself. */
static inline __attribute__((always_inline)) void add_all(const number *gradient, const number *inputs,
                                                          float *const *homes, number *laid, int64_t rows,
                                                          int64_t outputs, int64_t width, int is_new, int threads,
                                                          const int is_tiled) {
    int64_t blocks = outputs / BLOCK, steps = rows / 32, rounds = (blocks + threads * BLOCKS - 1) / (threads * BLOCKS);
    int64_t each = (blocks + threads * rounds - 1) / (threads * rounds);
    number *panels = laid + rows * width;
#pragma omp parallel num_threads(threads)
    {
        number *panel = panels + omp_get_thread_num() * BLOCKS * BLOCK * rows;
#pragma omp for schedule(static)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t block = 0; block < width / BLOCK; block++)
                lay(inputs + 32 * step * width + BLOCK * block, width, is_tiled, 0,
                    laid + (block * steps + step) * TILES);
#ifdef MATRICES
        if (is_tiled) lay_out(32);
#endif
#pragma omp for schedule(static)
        for (int64_t first = 0; first < blocks; first += each) {
            int64_t end = first + each < blocks ? first + each : blocks;
            for (int64_t step = 0; step < steps; step++)
                for (int64_t block = first; block < end; block++)
                    lay(gradient + 32 * step * outputs + BLOCK * block, outputs, is_tiled, is_tiled,
                        panel + ((block - first) * steps + step) * TILES);
            for (int64_t other = 0; other < width / BLOCK; other++)
                for (int64_t from = 0; from < steps; from += STEPS)
                    for (int64_t block = first; block < end; block++) {
                        const number *of = panel + ((block - first) * steps + from) * TILES;
                        const number *with = laid + (other * steps + from) * TILES;
                        float *sums = homes[block] + BLOCK * other;
                        int64_t count = steps - from < STEPS ? steps - from : STEPS;
                        const float *next = from > 0 || other + 1 == width / BLOCK ? NULL : sums + BLOCK;
#ifdef MATRICES
                        if (is_tiled) {
                            add_tiles(of, with, count, sums, width, is_new && from == 0, next);
                            continue;
                        }
#endif
                        add_pairs(of, with, count, sums, width, is_new && from == 0, next);
                    }
        }
#ifdef MATRICES
        if (is_tiled) _tile_release();
#endif
    }
}

/* Add gradient^T inputs, of gradient [rows outputs] and inputs [rows width], to sums. homes [outputs / 32]: where those of
   32 outputs lie, Float[32 width]. is_new: nothing is in them. laid: room for rows * (width + 128 threads) numbers. */
EXPORT void add_gradient(const number *gradient, const number *inputs, float *const *homes, number *laid, int64_t rows,
                         int64_t outputs, int64_t width, int is_new, int threads) {
#ifdef MATRICES
    if (has_matrices()) {
        add_all(gradient, inputs, homes, laid, rows, outputs, width, is_new, threads, 1);
        return;
    }
#endif
    add_all(gradient, inputs, homes, laid, rows, outputs, width, is_new, threads, 0);
}

#endif
