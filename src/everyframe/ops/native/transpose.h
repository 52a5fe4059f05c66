/* Rows of words transposed into columns of a panel; see product.h. */

#pragma once

#include "numbers.h"

/* A block of LANES by LANES words, its rows `step` apart, transposed. */
INLINE void transpose(const uint32_t *from, long step, uint32_t *to, long to_step) {
#ifdef CAN_SHUFFLE
  words a[LANES], b[LANES];
  for (int i = 0; i < LANES; i++) memcpy(&a[i], from + i * step, sizeof a[i]);
  /* Blocks of eight by eight words change places with their opposites, then smaller ones. */
#define ROUND(in, out, width, LOW, HIGH)                                      \
  for (int i = 0; i < LANES; i++)                                             \
    if (!(i & width)) {                                                       \
      out[i] = __builtin_shufflevector(in[i], in[i + width], LOW);            \
      out[i + width] = __builtin_shufflevector(in[i], in[i + width], HIGH);   \
    }
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
  ROUND(a, b, 8, LOW_8, HIGH_8)
  ROUND(b, a, 4, LOW_4, HIGH_4)
  ROUND(a, b, 2, LOW_2, HIGH_2)
  ROUND(b, a, 1, LOW_1, HIGH_1)
#undef ROUND
  for (int i = 0; i < LANES; i++) memcpy(to + i * to_step, &a[i], sizeof a[i]);
#else
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) to[j * to_step + i] = from[i * step + j];
#endif
}

/* LANES rows of `width` words, of which `count` exist; the others are zero. */
INLINE void transpose_rows(const uint32_t *from, long step, long count, long width, uint32_t *to,
                           long to_step) {
  for (long c = 0; c < width; c += LANES) {
    long few = smaller(width - c, LANES);
    if (count >= LANES && few == LANES) {
      transpose(from + c, step, to + c * to_step, to_step);
      continue;
    }
    for (long i = 0; i < few; i++)
      for (long lane = 0; lane < LANES; lane++) {
        uint32_t word = 0;
        if (lane < count) memcpy(&word, from + lane * step + c + i, sizeof word);
        to[(c + i) * to_step + lane] = word;
      }
  }
}
