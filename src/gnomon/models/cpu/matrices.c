/* Gradients of weights by matrix registers: float32 sums that many rows of bfloat16 are added to.

   Registers multiply 32 rows, each with its inner numbers in order, by 32 columns, in pairs of inner numbers
   [inner / 2, 16, 2]; here inner numbers are positions. Both factors are laid out so first. Every extent is a multiple of
   32. */

#include <omp.h>

#include "matrices.h"

#ifdef MATRICES

#define BLOCK 32
/* Numbers of a block of 32 by 32: two tiles. */
#define TILES 1024
/* Blocks of outputs that a thread lays out at a time, and blocks of positions that are multiplied at a time. */
#define BLOCKS 4
#define STEPS 8

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

/* Two tiles of a block of 32 positions `apart` apart: of pairs of positions or, turned round, of outputs. */
static inline __attribute__((always_inline)) void lay(const number *from, int64_t apart, const int turns, number *to) {
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
        for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + half * (TILES / 2) + 32 * i, tiles[half][i]);
    }
}

/* Add products over `steps` blocks of positions to a block of sums. is_new: nothing is in it. The block of sums at `next`
   is asked for meanwhile. */
static inline void add_block(const number *outputs, const number *inputs, int64_t steps, float *sums, int64_t apart,
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

/* Whether there are matrix registers. */
EXPORT int matrices(void) { return has_matrices(); }

/* Add gradient^T inputs, of gradient [rows outputs] and inputs [rows width], to sums. homes [outputs / 32]: where those of
   32 outputs lie, Float[32 width]. is_new: nothing is in them. laid: room for rows * (width + 128 threads) numbers. */
EXPORT void add_gradient(const number *gradient, const number *inputs, float *const *homes, number *laid, int64_t rows,
                         int64_t outputs, int64_t width, int is_new, int threads) {
    int64_t blocks = outputs / BLOCK, steps = rows / 32, rounds = (blocks + threads * BLOCKS - 1) / (threads * BLOCKS);
    int64_t each = (blocks + threads * rounds - 1) / (threads * rounds);
    number *panels = laid + rows * width;
#pragma omp parallel num_threads(threads)
    {
        number *panel = panels + omp_get_thread_num() * BLOCKS * BLOCK * rows;
#pragma omp for schedule(static)
        for (int64_t step = 0; step < steps; step++)
            for (int64_t block = 0; block < width / BLOCK; block++)
                lay(inputs + 32 * step * width + BLOCK * block, width, 0, laid + (block * steps + step) * TILES);
        lay_out(32);
#pragma omp for schedule(static)
        for (int64_t first = 0; first < blocks; first += each) {
            int64_t end = first + each < blocks ? first + each : blocks;
            for (int64_t step = 0; step < steps; step++)
                for (int64_t block = first; block < end; block++)
                    lay(gradient + 32 * step * outputs + BLOCK * block, outputs, 1,
                        panel + ((block - first) * steps + step) * TILES);
            for (int64_t other = 0; other < width / BLOCK; other++)
                for (int64_t from = 0; from < steps; from += STEPS)
                    for (int64_t block = first; block < end; block++) {
                        float *sums = homes[block] + BLOCK * other;
                        int is_last = from > 0 || other + 1 == width / BLOCK;
                        add_block(panel + ((block - first) * steps + from) * TILES, laid + (other * steps + from) * TILES,
                                  steps - from < STEPS ? steps - from : STEPS, sums, width, is_new && from == 0,
                                  is_last ? NULL : sums + BLOCK);
                    }
        }
        _tile_release();
    }
}

#endif
