/* From a row of logits to the few numbers that are wanted of it (models/head.py). */

#include <math.h>

#include "numbers.h"

/* Terms that are added up in float before they go into a double. */
#define TERMS 256

static inline float largest_of(const number *restrict row, int64_t width) {
    float largest = -INFINITY;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < width; i++) largest = wide(row[i]) > largest ? wide(row[i]) : largest;
    return largest;
}

/* With z = logits / temperature: largest z; total = sum exp(z - largest); logprob of the row's target; entropy, or NULL. */
EXPORT void head(const number *logits, const int64_t *targets, float *largest, float *total, float *logprob,
                 float *entropy, int64_t rows, int64_t width, float temperature, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *restrict own = logits + row * width;
        float most = largest_of(own, width) / temperature;
        double mass = 0.0, mean = 0.0;
        for (int64_t first = 0; first < width; first += TERMS) {
            int64_t end = first + TERMS < width ? first + TERMS : width;
            float some = 0.0f, weighted = 0.0f;
            if (entropy) {
#pragma omp simd reduction(+ : some, weighted)
                for (int64_t i = first; i < end; i++) {
                    float x = wide(own[i]) / temperature - most, m = exponential(x);
                    some += m;
                    weighted += m > 0.0f ? m * x : 0.0f;
                }
            } else {
#pragma omp simd reduction(+ : some)
                for (int64_t i = first; i < end; i++) some += exponential(wide(own[i]) / temperature - most);
            }
            mass += some;
            mean += weighted;
        }
        double normalizer = log(mass);
        largest[row] = most;
        total[row] = (float)mass;
        logprob[row] = (float)(wide(own[targets[row]]) / temperature - most - normalizer);
        if (entropy) entropy[row] = (float)(normalizer - mean / mass);
    }
}

/* Turn logits of `width` tokens from `first` on into the gradient of a loss with respect to them, in place:
   (onehot g - p (g + h (log p + entropy))) / temperature, g and h [rows] the gradients of logprob and entropy. */
EXPORT void head_back(number *logits, const int64_t *targets, const float *largest, const float *total,
                      const float *entropy, const float *to_logprob, const float *to_entropy, int64_t rows,
                      int64_t width, int64_t first, float temperature, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        number *restrict own = logits + row * width;
        int64_t target = targets[row] - first;
        int is_here = target >= 0 && target < width;
        float most = largest[row], g = to_logprob[row], factor = -1.0f / (total[row] * temperature);
        float kept = is_here ? wide(own[target]) : 0.0f, slope;
        if (to_entropy) {
            float h = to_entropy[row], constant = g + h * (entropy[row] - logf(total[row]));
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float x = wide(own[i]) / temperature - most, m = exponential(x);
                own[i] = narrow(m > 0.0f ? factor * m * (constant + h * x) : 0.0f);
            }
            slope = factor * exponential(kept / temperature - most) * (constant + h * (kept / temperature - most));
        } else {
            float all = factor * g;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) own[i] = narrow(all * exponential(wide(own[i]) / temperature - most));
            slope = all * exponential(kept / temperature - most);
        }
        if (is_here) own[target] = narrow(slope + g / temperature);
    }
}
