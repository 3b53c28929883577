/* Attention where responses branch off a prompt (models/branched.py), forward and backward, in float.

   One task is a prompt with all of its responses and one head of keys, so that what flows back into the prompt's keys
   is added up in one order by one thread. Within it queries are taken in blocks whose scores stay in the cache.

   Prompts may begin with one stem. Then a task is one of at most PARTS runs of prompts; what flows back into the stem
   is kept for each task, and added up in the order of tasks. */

#include <math.h>
#include <stdlib.h>

#include "product.h"

/* Scores that exist at one time, in numbers: 256 KiB. */
#define MOST (1 << 16)
#define PARTS 8

typedef struct {
    const number *made;
    int64_t heads, shared, size, padded;
    float scale;
} source;

/* Keys and values of a task: as rows, and turned round (`length` apart). */
typedef struct {
    float *keys, *values, *turned_keys, *turned_values, *d_keys, *d_values;
    int64_t length;
} sides;

static inline int64_t padded(int64_t count) { return (count + 15) & ~(int64_t)15; }

static inline const number *head_of(const source *of, int64_t position, int64_t head) {
    return of->made + (position * (of->heads + 2 * of->shared) + head) * of->size;
}

static void read_rows(const number *from, int64_t apart, int64_t rows, int64_t size, int64_t width, float *to) {
    for (int64_t row = 0; row < rows; row++) {
        float *restrict own = to + row * width;
        const number *restrict given = from + row * apart;
#pragma omp simd
        for (int64_t i = 0; i < size; i++) own[i] = wide(given[i]);
        for (int64_t i = size; i < width; i++) own[i] = 0.0f;
    }
}

static void turn_round(const float *rows, int64_t count, int64_t width, float *to, int64_t apart) {
    for (int64_t first = 0; first < count; first += 16) {
        int64_t end = first + 16 < count ? first + 16 : count;
        for (int64_t i = 0; i < width; i++)
            for (int64_t row = first; row < end; row++) to[i * apart + row] = rows[row * width + i];
    }
}

/* Read `count` positions' keys and values to place `at` of the sides. */
static void read_sides(const source *of, const sides *to, int64_t first, int64_t count, int64_t at, int64_t head,
                       int turns_keys, int turns_values) {
    int64_t apart = (of->heads + 2 * of->shared) * of->size, width = of->padded;
    read_rows(head_of(of, first, of->heads + head), apart, count, of->size, width, to->keys + at * width);
    read_rows(head_of(of, first, of->heads + of->shared + head), apart, count, of->size, width, to->values + at * width);
    if (turns_keys) turn_round(to->keys + at * width, count, width, to->turned_keys + at, to->length);
    if (turns_values) turn_round(to->values + at * width, count, width, to->turned_values + at, to->length);
}

/* How many positions' queries go together, behind so many keys. */
static int64_t block_for(int64_t group, int64_t keys) {
    int64_t most = MOST / (group * padded(keys));
    return most < 1 ? 1 : most > 64 ? 64 : most;
}

/* Queries [count * group, padded] of positions, a position's heads one after another. */
static void read_queries(const number *from, int64_t apart, int64_t count, int64_t group, int64_t size, int64_t width,
                         float *to) {
    for (int64_t i = 0; i < count; i++) read_rows(from + i * apart, size, group, size, width, to + i * group * width);
}

/* Positions [first, first + count), which see `prefix` keys and then their own ones up to themselves. */
static void segment_forward(const source *of, const sides *at, int64_t first, int64_t count, int64_t prefix,
                            int64_t head, number *result, float *sums, float *queries, float *scores,
                            float *found) {
    int64_t group = of->heads / of->shared, width = of->padded, step = block_for(group, prefix + count);
    for (int64_t begin = 0; begin < count; begin += step) {
        int64_t now = begin + step < count ? step : count - begin, keys = prefix + begin + now, apart = padded(keys);
        int64_t width_all = (of->heads + 2 * of->shared) * of->size;
        read_queries(head_of(of, first + begin, head * group), width_all, now, group, of->size, width, queries);
        product(queries, width, 1, at->turned_keys, at->length, scores, apart, now * group, apart, of->size, 0);
        for (int64_t row = 0; row < now * group; row++) {
            int64_t position = first + begin + row / group, seen = prefix + begin + row / group + 1;
            float *restrict own = scores + row * apart, largest = -INFINITY;
            double total = 0.0;
#pragma omp simd reduction(max : largest)
            for (int64_t i = 0; i < seen; i++) largest = own[i] > largest ? own[i] : largest;
            float shift = of->scale * largest;
#pragma omp simd reduction(+ : total)
            for (int64_t i = 0; i < seen; i++) {
                own[i] = exponential(of->scale * own[i] - shift);
                total += own[i];
            }
            float inverse = (float)(1.0 / total);
#pragma omp simd
            for (int64_t i = 0; i < seen; i++) own[i] *= inverse;
            for (int64_t i = seen; i < keys; i++) own[i] = 0.0f;
            float *kept = sums + 2 * (position * of->heads + head * group + row % group);
            kept[0] = shift;
            kept[1] = inverse;
        }
        product(scores, apart, 1, at->values, width, found, width, now * group, width, keys, 0);
        for (int64_t row = 0; row < now * group; row++) {
            number *restrict to = result + ((first + begin + row / group) * of->heads + head * group + row % group) * of->size;
            const float *restrict own = found + row * width;
#pragma omp simd
            for (int64_t i = 0; i < of->size; i++) to[i] = narrow(own[i]);
        }
    }
}

static void segment_backward(const source *of, const sides *at, int64_t first, int64_t count, int64_t prefix,
                             int64_t head, const number *gradient, const float *sums, number *back,
                             float *queries, float *outs, float *scores, float *d_scores, float *found) {
    int64_t group = of->heads / of->shared, width = of->padded, step = block_for(group, prefix + count);
    int64_t total = of->heads + 2 * of->shared;
    for (int64_t begin = 0; begin < count; begin += step) {
        int64_t now = begin + step < count ? step : count - begin, keys = prefix + begin + now, apart = padded(keys);
        int64_t rows = now * group, start = first + begin;
        read_queries(head_of(of, start, head * group), total * of->size, now, group, of->size, width, queries);
        read_queries(gradient + (start * of->heads + head * group) * of->size, of->heads * of->size, now, group, of->size,
                     width, outs);
        product(queries, width, 1, at->turned_keys, at->length, scores, apart, rows, apart, of->size, 0);
        product(outs, width, 1, at->turned_values, at->length, d_scores, apart, rows, apart, of->size, 0);
        for (int64_t row = 0; row < rows; row++) {
            int64_t seen = prefix + begin + row / group + 1;
            float *restrict own = scores + row * apart, *restrict back_own = d_scores + row * apart;
            double mean = 0.0;
            const float *kept = sums + 2 * ((start + row / group) * of->heads + head * group + row % group);
#pragma omp simd reduction(+ : mean)
            for (int64_t i = 0; i < seen; i++) {
                own[i] = kept[1] * exponential(of->scale * own[i] - kept[0]);
                mean += (double)own[i] * back_own[i];
            }
#pragma omp simd
            for (int64_t i = 0; i < seen; i++) back_own[i] = of->scale * own[i] * (float)(back_own[i] - mean);
            for (int64_t i = seen; i < keys; i++) own[i] = back_own[i] = 0.0f;
        }
        product(scores, 1, apart, outs, width, at->d_values, width, keys, width, rows, 1);
        product(d_scores, 1, apart, queries, width, at->d_keys, width, keys, width, rows, 1);
        product(d_scores, apart, 1, at->keys, width, found, width, rows, width, keys, 0);
        for (int64_t row = 0; row < rows; row++) {
            number *restrict to = back + ((start + row / group) * total + head * group + row % group) * of->size;
            const float *restrict own = found + row * width;
#pragma omp simd
            for (int64_t i = 0; i < of->size; i++) to[i] = narrow(own[i]);
        }
    }
}

/* Where a task calculates. */
typedef struct {
    float *queries, *outs, *found, *scores, *d_scores;
} rooms;

/* One segment's output, or, where gradient is given, its gradient; what flows back into its own keys begins at 0. */
static void segment(const source *of, const sides *at, int64_t first, int64_t count, int64_t prefix, int64_t head,
                    number *result, const number *gradient, float *sums, number *back, const rooms *with) {
    if (gradient == NULL) {
        segment_forward(of, at, first, count, prefix, head, result, sums, with->queries, with->scores, with->found);
        return;
    }
    memset(at->d_keys + prefix * of->padded, 0, (size_t)(count * of->padded) * sizeof(float));
    memset(at->d_values + prefix * of->padded, 0, (size_t)(count * of->padded) * sizeof(float));
    segment_backward(of, at, first, count, prefix, head, gradient, sums, back, with->queries, with->outs, with->scores,
                     with->d_scores, with->found);
}

static void write_sides(const source *of, const sides *from, int64_t first, int64_t count, int64_t at, int64_t head,
                        number *back) {
    int64_t total = of->heads + 2 * of->shared;
    for (int64_t row = 0; row < count; row++) {
        number *to = back + ((first + row) * total + of->heads + head) * of->size;
        for (int64_t i = 0; i < of->size; i++) {
            to[i] = narrow(from->d_keys[(at + row) * of->padded + i]);
            to[of->shared * of->size + i] = narrow(from->d_values[(at + row) * of->padded + i]);
        }
    }
}

/* stem: positions [0, stem) come before every prompt, and are in none. spans Int64[count 4]: where a prompt begins, its
   length, its first response and how many; responses Int64[. 2]: where each begins and its length. made [positions heads + 2 shared, size]; result [positions heads size]; sums
   Float32[positions heads 2]: a query's largest score, and 1 / sum exp(score - largest). Where gradient is given, back [like made] is written instead. */
EXPORT int branched(const number *made, const int64_t *spans, const int64_t *responses, number *result,
                     float *sums, const number *gradient, number *back, int64_t stem, int64_t count, int64_t heads,
                     int64_t shared, int64_t size, float scale, int threads) {
    source of = {made, heads, shared, size, padded(size), scale};
    int64_t group = heads / shared, longest = stem, parts = stem && count > PARTS ? PARTS : count;
    for (int64_t span = 0; span < count; span++) {
        int64_t prompt = stem + spans[4 * span + 1];
        longest = prompt > longest ? prompt : longest;
        for (int64_t i = 0; i < spans[4 * span + 3]; i++) {
            int64_t all = prompt + responses[2 * (spans[4 * span + 2] + i) + 1];
            longest = all > longest ? all : longest;
        }
    }
    int64_t length = padded(longest), queries = 64 * group * of.padded, rows = length * of.padded;
    int64_t scores = MOST > group * length ? MOST : group * length;
    int64_t room = 6 * rows + 3 * queries + 2 * scores, share = 2 * stem * of.padded;
    float *into_stem = stem && gradient != NULL ? malloc((size_t)(parts * shared * share) * sizeof(float)) : NULL;
    int lacks = stem && gradient != NULL && into_stem == NULL;
    if (lacks) return 1;
#pragma omp parallel num_threads(threads)
    {
        float *all = malloc((size_t)room * sizeof(float));
        if (all == NULL)
#pragma omp atomic write
            lacks = 1;
        sides at = {all, all + rows, all + 2 * rows, all + 3 * rows, all + 4 * rows, all + 5 * rows, length};
        float *own_queries = all + 6 * rows, *own_scores = own_queries + 3 * queries;
        rooms with = {own_queries, own_queries + queries, own_queries + 2 * queries, own_scores, own_scores + scores};
        int is_back = gradient != NULL;
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < parts * shared; task++) {
            if (all == NULL) continue;
            int64_t part = task / shared, head = task % shared;
            read_sides(&of, &at, 0, stem, 0, head, 1, is_back);
            if (is_back) {
                memset(at.d_keys, 0, (size_t)(stem * of.padded) * sizeof(float));
                memset(at.d_values, 0, (size_t)(stem * of.padded) * sizeof(float));
            }
            if (part == 0 && stem)
                segment(&of, &at, 0, stem, 0, head, result, gradient, sums, back, &with);
            for (int64_t number = part * count / parts; number < (part + 1) * count / parts; number++) {
                const int64_t *span = spans + 4 * number;
                int64_t first = span[0], prompt = span[1];
                read_sides(&of, &at, first, prompt, stem, head, 1, is_back);
                segment(&of, &at, first, prompt, stem, head, result, gradient, sums, back, &with);
                for (int64_t i = 0; i < span[3]; i++) {
                    const int64_t *response = responses + 2 * (span[2] + i);
                    read_sides(&of, &at, response[0], response[1], stem + prompt, head, 1, is_back);
                    segment(&of, &at, response[0], response[1], stem + prompt, head, result, gradient, sums, back, &with);
                    if (is_back) write_sides(&of, &at, response[0], response[1], stem + prompt, head, back);
                }
                if (is_back) write_sides(&of, &at, first, prompt, stem, head, back);
            }
            if (into_stem != NULL) {
                memcpy(into_stem + task * share, at.d_keys, (size_t)(share / 2) * sizeof(float));
                memcpy(into_stem + task * share + share / 2, at.d_values, (size_t)(share / 2) * sizeof(float));
            }
        }
#pragma omp for schedule(static)
        for (int64_t head = 0; head < (into_stem != NULL ? shared : 0); head++) {
            if (all == NULL) continue;
            memset(at.d_keys, 0, (size_t)(share / 2) * sizeof(float));
            memset(at.d_values, 0, (size_t)(share / 2) * sizeof(float));
            for (int64_t part = 0; part < parts; part++) {
                const float *own = into_stem + (part * shared + head) * share;
                for (int64_t i = 0; i < share / 2; i++) {
                    at.d_keys[i] += own[i];
                    at.d_values[i] += own[share / 2 + i];
                }
            }
            write_sides(&of, &at, 0, stem, 0, head, back);
        }
        free(all);
    }
    free(into_stem);
    return lacks;
}
