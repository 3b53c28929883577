/* One position of many rows: rotary positions, keys and values into the cache, and what each query finds there.

   The cache is in blocks (models/lanes.py): the positions of a prompt, then a column for each of `lanes` rows, step by
   step. A row reads its prompt and its own columns and nothing else. */

#include <math.h>
#include <stdlib.h>

#include "numbers.h"

/* Positions whose keys are asked for before they are wanted. */
#define AHEAD 16

/* Which block a row is in, where its prompt begins there and how long it is, how many columns it has, which lane. */
typedef struct {
    int64_t block, begin, prompt, grown, lane;
} place;

static void turned(const number *restrict from, const number *restrict cosine, const number *restrict sine,
                   float *restrict to, int64_t size) {
    int64_t half = size / 2;
#pragma omp simd
    for (int64_t i = 0; i < half; i++) {
        float left = wide(from[i]), right = wide(from[i + half]);
        to[i] = rounded(left * wide(cosine[i]) - right * wide(sine[i]));
        to[i + half] = rounded(right * wide(cosine[i + half]) + left * wide(sine[i + half]));
    }
}

static inline int64_t column_of(const place *at, int64_t position, int64_t lanes) {
    int64_t own = position - at->prompt;
    return at->begin + (own < 0 ? position : at->prompt + own * lanes + at->lane);
}

/* scores[query][0 .. 3] = scale * queries . keys of four positions; four: room for these in float. */
static void compare(const float *queries, const number *const *keys, int64_t group, int64_t size, float scale,
                    float *four, float *scores, int64_t apart) {
    for (int at = 0; at < 4; at++)
        for (int64_t i = 0; i < size; i += LANES) store_float(four + at * size + i, load(keys[at] + i));
    for (int64_t query = 0; query < group; query++) {
        vector sums[4] = {{0}, {0}, {0}, {0}};
        for (int64_t i = 0; i < size; i += LANES) {
            vector q = load_float(queries + query * size + i);
            for (int at = 0; at < 4; at++) sums[at] += q * load_float(four + at * size + i);
        }
        float found[4];
        sum_four(sums, found);
        for (int at = 0; at < 4; at++) scores[query * apart + at] = scale * found[at];
    }
}

#if defined(HALF) && defined(__AVX512BF16__)
#define IN_PAIRS
/* The same in pairs of bfloat16, which rotated queries are. size: a multiple of 32. */
static void compare_pairs(const number *queries, const number *const *keys, int64_t group, int64_t size, float scale,
                          float *scores, int64_t apart) {
    for (int64_t query = 0; query < group; query++) {
        __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int64_t i = 0; i < size; i += 32) {
            __m512bh own = (__m512bh)_mm512_loadu_si512(queries + query * size + i);
            for (int at = 0; at < 4; at++)
                sums[at] = _mm512_dpbf16_ps(sums[at], own, (__m512bh)_mm512_loadu_si512(keys[at] + i));
        }
        float found[4];
        sum_four((const vector *)sums, found);
        for (int at = 0; at < 4; at++) scores[query * apart + at] = scale * found[at];
    }
}
#endif

/* found[query][from ..] = the mean of some of the values' numbers, weighted by each query's scores. */
static inline __attribute__((always_inline)) void gather(const number *values, const place *at, int64_t lanes,
                                                         int64_t from, int64_t count, int64_t size, const float *scores,
                                                         int64_t apart, float *found, const int queries,
                                                         const int parts) {
    vector sums[4][PARTS];
    for (int query = 0; query < queries; query++)
        for (int part = 0; part < parts; part++) sums[query][part] = (vector){0};
    for (int64_t position = 0; position < count; position++) {
        const number *value = values + column_of(at, position, lanes) * size + from;
        vector own[PARTS];
        for (int part = 0; part < parts; part++) own[part] = load(value + LANES * part);
        for (int query = 0; query < queries; query++) {
            float weight = scores[query * apart + position];
            for (int part = 0; part < parts; part++) sums[query][part] += weight * own[part];
        }
    }
    for (int query = 0; query < queries; query++)
        for (int part = 0; part < parts; part++) store_float(found + query * size + from + LANES * part, sums[query][part]);
}

#if PARTS == 4
#define BY_PARTS(call, parts)                                                                                          \
    switch (parts) {                                                                                                   \
        case 1: call(1); break;                                                                                        \
        case 2: call(2); break;                                                                                        \
        case 3: call(3); break;                                                                                        \
        default: call(4);                                                                                              \
    }
#else
#define BY_PARTS(call, parts)                                                                                          \
    (void)(parts);                                                                                                     \
    call(PARTS);
#endif

/* What `group` queries find among their row's columns; scores: room for group * (count + 3). size: a multiple of 16. */
static void look(const float *queries, const number *keys, const number *values, const place *at, int64_t lanes,
                 float scale, int64_t group, int64_t size, float *four, float *scores, float *found) {
    int64_t count = at->prompt + at->grown + 1, apart = (count + 3) & ~(int64_t)3;
#ifdef IN_PAIRS
    number *narrowed = (number *)four;
    int in_pairs = size % 32 == 0 && group <= 8;
    for (int64_t i = 0; in_pairs && i < group * size; i++) narrowed[i] = narrow(queries[i]);
#endif
    for (int64_t position = 0; position < count; position += 4) {
        const number *near[4];
        for (int64_t i = 0; i < 4; i++) {
            int64_t last = position + i < count ? position + i : count - 1;
            near[i] = keys + column_of(at, last, lanes) * size;
        }
        /* What comes later is asked for as it lies in memory, columns of other rows of the block too: they are next. */
        if (at->lane == 0) {
            int64_t end = column_of(at, count - 1, lanes) + lanes, now = column_of(at, position, lanes);
            int64_t many = position < at->prompt ? 4 : 4 * lanes;
            for (int64_t line = now; line < now + many; line++) {
                int64_t soon = (line + AHEAD < end ? line + AHEAD : end - 1) * size;
                for (int64_t from = 0; from < size; from += 64 / (int64_t)sizeof(number)) {
                    __builtin_prefetch(keys + soon + from, 0, 2);
                    __builtin_prefetch(values + soon + from, 0, 2);
                }
            }
        }
#ifdef IN_PAIRS
        if (in_pairs) {
            compare_pairs(narrowed, near, group, size, scale, scores + position, apart);
            continue;
        }
#endif
        compare(queries, near, group, size, scale, four, scores + position, apart);
    }
    for (int64_t query = 0; query < group; query++) {
        float *own = scores + query * apart, largest = own[0], total = 0.0f;
#pragma omp simd reduction(max : largest)
        for (int64_t i = 0; i < count; i++) largest = own[i] > largest ? own[i] : largest;
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < count; i++) {
            own[i] = exponential(own[i] - largest);
            total += own[i];
        }
        float inverse = 1.0f / total;
#pragma omp simd
        for (int64_t i = 0; i < count; i++) own[i] *= inverse;
    }
    for (int64_t first = 0; first < group; first += 4)
        for (int64_t from = 0; from < size; from += LANES * PARTS) {
#define GATHER(queries, parts)                                                                                         \
    gather(values, at, lanes, from, count, size, scores + first * apart, apart, found + first * size, queries, parts)
#define GATHER_ONE(parts) GATHER(1, parts)
#define GATHER_TWO(parts) GATHER(2, parts)
#define GATHER_THREE(parts) GATHER(3, parts)
#define GATHER_FOUR(parts) GATHER(4, parts)
            int64_t parts = (size - from) / LANES;
            switch (group - first) {
                case 1: BY_PARTS(GATHER_ONE, parts) break;
                case 2: BY_PARTS(GATHER_TWO, parts) break;
                case 3: BY_PARTS(GATHER_THREE, parts) break;
                default: BY_PARTS(GATHER_FOUR, parts)
            }
        }
}

/* The same for any size. */
static void look_slowly(const float *queries, const number *keys, const number *values, const place *at, int64_t lanes,
                        float scale, int64_t group, int64_t size, float *four, float *scores, float *found) {
    (void)four;
    int64_t count = at->prompt + at->grown + 1;
    for (int64_t query = 0; query < group; query++) {
        float largest = -INFINITY, total = 0.0f;
        for (int64_t position = 0; position < count; position++) {
            const number *key = keys + column_of(at, position, lanes) * size;
            float sum = 0.0f;
            for (int64_t i = 0; i < size; i++) sum += queries[query * size + i] * wide(key[i]);
            scores[position] = scale * sum;
            largest = scores[position] > largest ? scores[position] : largest;
        }
        for (int64_t position = 0; position < count; position++)
            total += scores[position] = exponential(scores[position] - largest);
        for (int64_t i = 0; i < size; i++) {
            float sum = 0.0f;
            for (int64_t position = 0; position < count; position++)
                sum += scores[position] * wide(values[column_of(at, position, lanes) * size + i]);
            found[query * size + i] = sum / total;
        }
    }
}

/* made [rows heads + 2 shared, size]: queries, keys, values; places Int64[rows 5]; keys, values [blocks shared columns
   size]; result [rows heads size]. */
EXPORT int attend(const number *made, const number *cosines, const number *sines, const int64_t *places, number *keys,
                   number *values, number *result, int64_t rows, int64_t heads, int64_t shared, int64_t size,
                   int64_t columns, int64_t lanes, float scale, int threads) {
    int64_t group = heads / shared, longest = 0;
    for (int64_t row = 0; row < rows; row++) {
        const place *at = (const place *)(places + 5 * row);
        int64_t count = at->prompt + at->grown + 1;
        longest = count > longest ? count : longest;
    }
    int64_t rounds = (rows + lanes - 1) / lanes;
    int lacks = 0;
#pragma omp parallel num_threads(threads)
    {
        float *room = malloc((size_t)(group * (longest + 3) + (2 * group + 4) * size) * sizeof(float));
        if (room == NULL)
#pragma omp atomic write
            lacks = 1;
        float *queries = room, *found = queries + group * size, *column = found + group * size, *scores = column + 4 * size;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < rounds * shared * lanes; task++) {
            /* The rows of a block one after another, whose columns alternate in memory. */
            int64_t row = task / (shared * lanes) * lanes + task % lanes, head = task / lanes % shared;
            if (room == NULL || row >= rows) continue;
            const place *at = (const place *)(places + 5 * row);
            const number *own = made + row * (heads + 2 * shared) * size;
            const number *cosine = cosines + row * size, *sine = sines + row * size;
            int64_t first = (at->block * shared + head) * columns;
            number *to_keys = keys + first * size, *to_values = values + first * size;
            int64_t now = column_of(at, at->prompt + at->grown, lanes) * size;
            turned(own + (heads + head) * size, cosine, sine, column, size);
            for (int64_t i = 0; i < size; i++) to_keys[now + i] = narrow(column[i]);
            memcpy(to_values + now, own + (heads + shared + head) * size, (size_t)size * sizeof(number));
            for (int64_t query = 0; query < group; query++)
                turned(own + (head * group + query) * size, cosine, sine, queries + query * size, size);
            (size % 16 ? look_slowly : look)(queries, to_keys, to_values, at, lanes, scale, group, size, column, scores, found);
            number *to = result + (row * heads + head * group) * size;
            for (int64_t i = 0; i < group * size; i++) to[i] = narrow(found[i]);
        }
        free(room);
    }
    return lacks;
}
