/* One kind of number for a whole library: bfloat16 where HALF is defined, float otherwise. Sums are always float. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX2__
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))

#ifdef HALF
typedef uint16_t number;

static inline float wide(number x) {
    uint32_t bits = (uint32_t)x << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* To the nearest, ties to even; NaN stays NaN. */
static inline number narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (number)(x == x ? rounded : 0x7fc0u);
}
#else
typedef float number;

static inline float wide(number x) { return x; }

static inline number narrow(float x) { return x; }
#endif

static inline float rounded(float x) { return wide(narrow(x)); }

/* e to the x, to a relative 2e-7; 0 below -87.3, infinite above 88.7. Source: Cephes, expf. */
static inline float exponential(float x) {
    float bounded = x > 88.72283f ? 88.72283f : x;
    bounded = bounded < -87.33654f ? -87.33654f : bounded;
    float shifted = bounded * 1.44269504f + 12582912.0f;
    float power = shifted - 12582912.0f;
    float rest = bounded - power * 0.693359375f;
    rest = rest + power * 2.12194440e-4f;
    float sum = 1.9875691500e-4f;
    sum = sum * rest + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    /* Two factors: 2 to the 128th is no float. */
    int32_t exponent = (int32_t)power, half = exponent >> 1;
    uint32_t low = (uint32_t)(half + 127) << 23, high = (uint32_t)(exponent - half + 127) << 23;
    float by_low, by_high;
    memcpy(&by_low, &low, sizeof by_low);
    memcpy(&by_high, &high, sizeof by_high);
    float result = sum * by_low * by_high;
    return x < -87.33654f ? 0.0f : result;
}

/* As many numbers as a register holds, and how many registers of a row a tile of sums may take. */
#if defined(__AVX512F__)
#define LANES 16
#define PARTS 4
#elif defined(__AVX__)
#define LANES 8
#define PARTS 2
#else
#define LANES 4
#define PARTS 4
#endif

typedef float vector __attribute__((vector_size(4 * LANES)));

static inline vector load_float(const float *from) {
    vector result;
    memcpy(&result, from, sizeof result);
    return result;
}

static inline void store_float(float *to, vector from) { memcpy(to, &from, sizeof from); }

#ifdef HALF
typedef uint16_t narrow_bits __attribute__((vector_size(2 * LANES)));
typedef uint32_t wide_bits __attribute__((vector_size(4 * LANES)));

static inline vector load(const number *from) {
    /* What GCC 12 makes of the last case takes three times as many instructions. */
#if LANES == 16
    return (vector)((wide_bits)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)) << 16);
#elif LANES == 8 && defined(__AVX2__)
    return (vector)((wide_bits)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from)) << 16);
#else
    narrow_bits bits;
    memcpy(&bits, from, sizeof bits);
    return (vector)(__builtin_convertvector(bits, wide_bits) << 16);
#endif
}
#else
static inline vector load(const number *from) { return load_float(from); }
#endif

/* The sums of four vectors each. */
static inline void sum_four(const vector *of, float *to) {
    typedef int places __attribute__((vector_size(4 * LANES)));
#if LANES == 16
    const places low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    const places high = {2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31};
    const places even = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const places odd = {2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31};
#elif LANES == 8
    const places low = {0, 8, 1, 9, 4, 12, 5, 13}, high = {2, 10, 3, 11, 6, 14, 7, 15};
    const places even = {0, 1, 8, 9, 4, 5, 12, 13}, odd = {2, 3, 10, 11, 6, 7, 14, 15};
#else
    const places low = {0, 4, 1, 5}, high = {2, 6, 3, 7}, even = {0, 1, 4, 5}, odd = {2, 3, 6, 7};
#endif
    vector first = __builtin_shuffle(of[0], of[1], low) + __builtin_shuffle(of[0], of[1], high);
    vector second = __builtin_shuffle(of[2], of[3], low) + __builtin_shuffle(of[2], of[3], high);
    vector all = __builtin_shuffle(first, second, even) + __builtin_shuffle(first, second, odd);
#if LANES == 16
    const places halves = {8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7};
    const places quarters = {4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11};
    all += __builtin_shuffle(all, halves);
    all += __builtin_shuffle(all, quarters);
#elif LANES == 8
    const places halves = {4, 5, 6, 7, 0, 1, 2, 3};
    all += __builtin_shuffle(all, halves);
#endif
    memcpy(to, &all, 4 * sizeof(float));
}
