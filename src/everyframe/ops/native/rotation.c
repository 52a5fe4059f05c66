/* Rotary position embedding of tokens (batches, heads, positions, width). */

#include "numbers.h"

/* Lane i is lane `of(i)` of x. */
#ifdef CAN_SHUFFLE
#define PICK(of, x) __builtin_shufflevector(x, x, EACH_LANE(of, 0))
#else
#define PICK(of, x) pick_lanes((const int[]){EACH_LANE(of, 0)}, x)
INLINE floats pick_lanes(const int *from, floats x) {
  float lanes[LANES], picked[LANES];
  memcpy(lanes, &x, sizeof lanes);
  for (int i = 0; i < LANES; i++) picked[i] = lanes[from[i]];
  memcpy(&x, picked, sizeof x);
  return x;
}
#endif
#define PARTNER(i, x) (i) ^ 1
#define EVEN(i, x) (i) & ~1
#define ODD(i, x) (i) | 1
#define SIGN(i, x) (i) & 1 ? 1.0f : -1.0f

/* The last lanes overlap those before them, which is faster than a part of a vector. */
INLINE long begin_of(long c, long size) {
  return c + LANES <= size || size < LANES ? c : size - LANES;
}

INLINE void turn_pairs(const void *x, void *y, long width, const float *cos, const float *sin,
                       int is_bf16) {
  const floats signs = {EACH_LANE(SIGN, 0)};
  for (long c = 0; c < width; c += LANES) {
    long i = begin_of(c, width), count = width - i;
    floats value = load(x, i, count, is_bf16);
    floats by_cos = PICK(EVEN, load(cos, i, count, 0)), by_sin = PICK(ODD, load(sin, i, count, 0));
    store(y, i, count, value * by_cos + PICK(PARTNER, value) * by_sin * signs, is_bf16);
  }
}

INLINE void turn_halves(const void *x, void *y, long first, long half, const float *cos,
                        const float *sin, int is_bf16) {
  for (long c = 0; c < half; c += LANES) {
    long i = begin_of(c, half), count = half - i;
    floats a = load(x, first + i, count, is_bf16), b = load(x, first + half + i, count, is_bf16);
    floats by_cos = load(cos, i, count, 0), by_sin = load(sin, i, count, 0);
    store(y, first + i, count, a * by_cos - b * by_sin, is_bf16);
    store(y, first + half + i, count, b * by_cos + a * by_sin, is_bf16);
  }
}

INLINE long offset_of(const long *strides, long batch, long head, long place) {
  return batch * strides[0] + head * strides[1] + place * strides[2];
}

INLINE void turn_row(const void *x, void *y, long place, long width, const float *cos,
                     const float *sin, const long *widths, long axes, int is_bf16) {
  if (!axes) turn_pairs(x, y, width, cos + place * width, sin + place * width, is_bf16);
  long first = 0, at_table = place * (width / 2);
  for (long axis = 0; axis < axes; axis++) {
    long half = widths[axis] / 2;
    turn_halves(x, y, first, half, cos + at_table, sin + at_table, is_bf16);
    first += 2 * half;
    at_table += half;
  }
}

/* Without axes, channels 2i and 2i + 1 rotate together; of a pair, tables (positions, width) hold
   the cosine at its first number and the sine at its second. With axes, so many channels wide, the
   halves of each rotate together; tables are (positions, width / 2). Strides are x's, then y's. */
EXPORT int rotate(const void *x, void *y, long batches, long heads, long positions, long width,
                  const long *strides, const float *cos, const float *sin, const long *widths,
                  long axes, int is_bf16, int threads) {
  /* In the order in which x lies in memory. */
  long is_by_place = strides[2] > strides[1];
  long outer = is_by_place ? positions : heads, inner = is_by_place ? heads : positions;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long each = 0; each < batches * outer; each++) {
    for (long i = 0; i < inner; i++) {
      long batch = each / outer, head = is_by_place ? i : each % outer;
      long place = is_by_place ? each % outer : i;
      const void *row = at(x, offset_of(strides, batch, head, place), is_bf16);
      void *to = at_out(y, offset_of(strides + 3, batch, head, place), is_bf16);
      BY_KIND(turn_row, row, to, place, width, cos, sin, widths, axes);
    }
  }
  return 0;
}
