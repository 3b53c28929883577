/* What lies between a layer's products, each in one pass over memory. Rows are computed one by one, so that a row's
   bits do not depend on how many there are or on how many threads share them. */

#include <math.h>

#include "numbers.h"

/* Rows whose gradients of a weight are added up together, in order. */
#define STRIPE 64

/* y = x / sqrt(mean(x^2) + epsilon) * weight, rounded once normalized and once weighted, as models do.
   x and y: groups of `period` rows of `width`, groups so many numbers apart; a group's row i has row i of the weights.
   y may be x. factor [rows]: 1 / sqrt(...), or NULL. */
EXPORT void norm(const number *x, const number *weight, number *y, float *factor, int64_t rows, int64_t width,
                 int64_t period, int64_t apart, int64_t apart_y, float epsilon, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *from = x + row / period * apart + row % period * width;
        const number *scale = weight + row % period * width;
        number *to = y + row / period * apart_y + row % period * width;
        float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < width; i++) sum += wide(from[i]) * wide(from[i]);
        float inverse = 1.0f / sqrtf(sum / (float)width + epsilon);
        if (factor) factor[row] = inverse;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) to[i] = narrow(rounded(wide(from[i]) * inverse) * wide(scale[i]));
    }
}

/* Back through `norm`: with u = x r, dx = r (du - u mean(du u)), du = gradient * weight. weight [period width];
   y again (or NULL); for_weight Float64[rows / STRIPE, rounded up, width] with period 1. x, y, dx, gradient are dense. */
EXPORT void norm_back(const number *gradient, const number *x, const float *factor, const number *weight,
                      number *dx, number *y, double *for_weight, int64_t rows, int64_t width, int threads) {
    int64_t stripes = (rows + STRIPE - 1) / STRIPE;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t stripe = 0; stripe < stripes; stripe++) {
        double *sums = for_weight + stripe * width;
        for (int64_t i = 0; i < width; i++) sums[i] = 0.0;
        int64_t end = (stripe + 1) * STRIPE < rows ? (stripe + 1) * STRIPE : rows;
        for (int64_t row = stripe * STRIPE; row < end; row++) {
            const number *restrict from = x + row * width, *restrict given = gradient + row * width;
            float inverse = factor[row], share = 0.0f;
#pragma omp simd reduction(+ : share)
            for (int64_t i = 0; i < width; i++) {
                float unit = rounded(wide(from[i]) * inverse), back = wide(given[i]);
                share += back * wide(weight[i]) * unit;
                sums[i] += back * unit;
            }
            share /= (float)width;
            number *restrict to = dx + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; i++) {
                float unit = rounded(wide(from[i]) * inverse);
                to[i] = narrow(inverse * (wide(given[i]) * wide(weight[i]) - unit * share));
            }
            if (y) {
                number *restrict again = y + row * width;
#pragma omp simd
                for (int64_t i = 0; i < width; i++)
                    again[i] = narrow(rounded(wide(from[i]) * inverse) * wide(weight[i]));
            }
        }
    }
}

/* Rotary positions of the first `turned` of `heads` heads of each row: halves (x, y) become
   (x cos - y sin, y cos + x sin); the others stay. cos, sin [rows size]; sign -1 turns back. */
EXPORT void turn(const number *x, const number *cosines, const number *sines, number *y, int64_t rows, int64_t turned,
                 int64_t heads, int64_t size, float sign, int threads) {
    int64_t half = size / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *restrict cosine = cosines + row * size, *restrict sine = sines + row * size;
        for (int64_t head = 0; head < turned; head++) {
            const number *restrict from = x + (row * heads + head) * size;
            number *restrict to = y + (row * heads + head) * size;
#pragma omp simd
            for (int64_t i = 0; i < half; i++) {
                float left = wide(from[i]), right = wide(from[i + half]);
                to[i] = narrow(left * wide(cosine[i]) - sign * right * wide(sine[i]));
                to[i + half] = narrow(right * wide(cosine[i + half]) + sign * left * wide(sine[i + half]));
            }
        }
        int64_t rest = (row * heads + turned) * size;
        memcpy(y + rest, x + rest, (size_t)((heads - turned) * size) * sizeof(number));
    }
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

/* y [rows width] = silu(gate) * up; opened [rows 2 width]: gate, then up. Rounded twice, as models do. */
EXPORT void gate(const number *opened, number *y, int64_t rows, int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *restrict gates = opened + row * 2 * width, *restrict ups = gates + width;
        number *restrict to = y + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float x = wide(gates[i]);
            to[i] = narrow(rounded(x * sigmoid(x)) * wide(ups[i]));
        }
    }
}

/* Back through `gate`: y again, and the gradient of opened [rows 2 width] from that of y. */
EXPORT void gate_back(const number *opened, const number *gradient, number *y, number *back, int64_t rows,
                      int64_t width, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++) {
        const number *restrict gates = opened + row * 2 * width, *restrict ups = gates + width;
        const number *restrict given = gradient + row * width;
        number *restrict to = y + row * width, *restrict to_gate = back + row * 2 * width;
        number *restrict to_up = to_gate + width;
#pragma omp simd
        for (int64_t i = 0; i < width; i++) {
            float x = wide(gates[i]), up = wide(ups[i]), g = wide(given[i]);
            float share = sigmoid(x), active = rounded(x * share);
            to[i] = narrow(active * up);
            to_up[i] = narrow(g * active);
            to_gate[i] = narrow(g * up * share * (1.0f + x * (1.0f - share)));
        }
    }
}
