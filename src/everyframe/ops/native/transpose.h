/* Rows of words transposed into columns of a panel; see product.h. */

#pragma once

#include "numbers.h"

/* A block of LANES by LANES words, its rows `step` apart, transposed. */
INLINE void transpose(const uint32_t *from, long step, uint32_t *to, long to_step) {
#ifdef CAN_SHUFFLE
  words a[LANES], b[LANES], *first = LANES == 8 ? b : a;
  for (int i = 0; i < LANES; i++) memcpy(&first[i], from + i * step, sizeof first[i]);
  /* Blocks of half the lanes change places with their opposites, then smaller ones. */
#define LOW(i, width) (i) & (width) ? LANES + (i) - (width) : (i)
#define HIGH(i, width) ((i) & (width) ? LANES : (width)) + (i)
#define ROUND(in, out, width)                                                              \
  for (int i = 0; i < LANES; i++)                                                          \
    if (!(i & width)) {                                                                    \
      out[i] = __builtin_shufflevector(in[i], in[i + width], EACH_LANE(LOW, width));        \
      out[i + width] = __builtin_shufflevector(in[i], in[i + width], EACH_LANE(HIGH, width)); \
    }
#if LANES > 8
  ROUND(a, b, 8)
#endif
#if LANES > 4
  ROUND(b, a, 4)
#endif
  ROUND(a, b, 2)
  ROUND(b, a, 1)
#undef LOW
#undef HIGH
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
