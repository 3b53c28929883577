/* One token a row by inverse transform of a given uniform (engines/sampler.py), without a copy of the logits. */

#include <math.h>
#include <stdlib.h>

#include "numbers.h"

/* Tokens whose masses are added up in float; between blocks sums are double. */
#define BLOCK 64

/* The first entry whose level is above `fraction` of the last, and how far into it that lies. Rounding may put the
   target at the last level itself: then it is the first entry that reaches that, the last one with any mass. */
static int64_t pick(const double *levels, int64_t count, double *fraction) {
    double total = levels[count - 1], target = *fraction * total;
    int64_t entry = 0;
    while (entry < count - 1 && !(levels[entry] > target) && !(levels[entry] >= total)) entry++;
    double below = entry > 0 ? levels[entry - 1] : 0.0, rest = (target - below) / (levels[entry] - below);
    *fraction = rest < 0.0 ? 0.0 : rest > 1.0 ? 1.0 : rest;
    return entry;
}

/* logits [rows width] over temperature; tokens and their log-probabilities [rows]. */
EXPORT int sample(const number *logits, const double *uniforms, int64_t *tokens, float *logprobs, int64_t rows,
                   int64_t width, float temperature, int threads) {
    int64_t blocks = (width + BLOCK - 1) / BLOCK;
    int lacks = 0;
#pragma omp parallel num_threads(threads)
    {
        double *levels = malloc((size_t)blocks * sizeof(double));
        if (levels == NULL)
#pragma omp atomic write
            lacks = 1;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            if (levels == NULL) continue;
            const number *restrict own = logits + row * width;
            float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
            for (int64_t i = 0; i < width; i++) largest = wide(own[i]) > largest ? wide(own[i]) : largest;
            double total = 0.0;
            for (int64_t block = 0; block < blocks; block++) {
                int64_t first = block * BLOCK, end = first + BLOCK < width ? first + BLOCK : width;
                float mass = 0.0f;
#pragma omp simd reduction(+ : mass)
                for (int64_t i = first; i < end; i++) mass += exponential((wide(own[i]) - largest) / temperature);
                levels[block] = total += mass;
            }
            double fraction = uniforms[row], inner[BLOCK], sum = 0.0;
            int64_t first = pick(levels, blocks, &fraction) * BLOCK;
            int64_t count = width - first < BLOCK ? width - first : BLOCK;
            for (int64_t i = 0; i < count; i++)
                inner[i] = sum += exponential((wide(own[first + i]) - largest) / temperature);
            tokens[row] = first + pick(inner, count, &fraction);
            logprobs[row] = (wide(own[tokens[row]]) - largest) / temperature - (float)log((double)(float)total);
        }
        free(levels);
    }
    return lacks;
}
