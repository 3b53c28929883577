/* Matrix registers. */

#include "numbers.h"

#if defined(HALF) && defined(__AVX512BF16__)

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define MATRICES
#endif

#ifdef MATRICES
/* Linux lends matrix registers to a process that asks once; others' kernels in the process may have asked before. */
static int has_matrices(void) {
    static int found = -1;
    if (found < 0) found = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return found;
}

/* Registers 0 to 3 are sums: (0, 1) of the first 16 rows, (2, 3) of the others; 4 and 5 rows; 6 and 7 weights. */
static void lay_out(int64_t rows) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) shape = {.palette = 1};
    uint8_t upper = (uint8_t)(rows < 16 ? rows : 16), lower = (uint8_t)(rows > 16 ? rows - 16 : 1);
    const uint8_t each[8] = {upper, upper, lower, lower, upper, lower, 16, 16};
    for (int i = 0; i < 8; i++) {
        shape.bytes[i] = 64;
        shape.rows[i] = each[i];
    }
    /* GCC 12 takes only the first eight bytes for read. */
    __asm__ volatile("" : : "r"(&shape) : "memory");
    _tile_loadconfig(&shape);
}
#endif
#endif
