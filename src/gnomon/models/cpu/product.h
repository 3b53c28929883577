/* C (+)= A B in float, for matrices of some hundred rows that stay in the cache. */

#include "numbers.h"

/* At most 6 rows by PARTS vectors of columns. A's entry (i, k) is at a[i * down + k * along]. */
static inline __attribute__((always_inline)) void product_tile(const float *a, int64_t down, int64_t along,
                                                               const float *b, int64_t apart_b, float *c,
                                                               int64_t apart_c, int64_t inner, int adds, const int rows,
                                                               const int parts) {
    vector sums[6][PARTS];
    for (int i = 0; i < rows; i++)
        for (int part = 0; part < parts; part++)
            sums[i][part] = adds ? load_float(c + i * apart_c + LANES * part) : (vector){0};
    for (int64_t k = 0; k < inner; k++) {
        vector row[PARTS];
        for (int part = 0; part < parts; part++) row[part] = load_float(b + k * apart_b + LANES * part);
        for (int i = 0; i < rows; i++) {
            float factor = a[i * down + k * along];
            for (int part = 0; part < parts; part++) sums[i][part] += factor * row[part];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int part = 0; part < parts; part++) store_float(c + i * apart_c + LANES * part, sums[i][part]);
}

#define TILE(rows, parts)                                                                                              \
    product_tile(a + i * down, down, along, b + j, apart_b, c + i * apart_c + j, apart_c, inner, adds, rows, parts)
#define TILES(parts)                                                                                                   \
    {                                                                                                                  \
        int64_t i = 0;                                                                                                 \
        for (; i + 6 <= rows; i += 6) TILE(6, parts);                                                                  \
        switch (rows - i) {                                                                                            \
            case 1: TILE(1, parts); break;                                                                             \
            case 2: TILE(2, parts); break;                                                                             \
            case 3: TILE(3, parts); break;                                                                             \
            case 4: TILE(4, parts); break;                                                                             \
            case 5: TILE(5, parts); break;                                                                             \
        }                                                                                                              \
    }

/* columns: a multiple of 16; B's and C's rows are dense and `apart_` numbers apart. adds: to what is in C. */
static void product(const float *a, int64_t down, int64_t along, const float *b, int64_t apart_b, float *c,
                    int64_t apart_c, int64_t rows, int64_t columns, int64_t inner, int adds) {
    for (int64_t j = 0; j < columns; j += LANES * PARTS)
        switch (columns - j < LANES * PARTS ? (columns - j) / LANES : PARTS) {
            case 2: TILES(2) break;
#if PARTS == 4
            case 1: TILES(1) break;
            case 3: TILES(3) break;
            case 4: TILES(4) break;
#endif
        }
}
