/* GELU, the gated GELU of feed-forwards (GEGLU), and the modulation and gated sum of a stream. */

#include "numbers.h"

INLINE void geglu_row(const void *x, void *y, long row, long width, int is_bf16) {
  for (long c = 0; c < width; c += LANES) {
    long count = width - c, at_value = row * 2 * width + c;
    floats value = load(x, at_value, count, is_bf16);
    floats gate = load(x, at_value + width, count, is_bf16);
    store(y, row * width + c, count, value * gelu(gate, is_bf16), is_bf16);
  }
}

/* y (rows, width) = value * gelu(gate) of x (rows, 2 width), which holds the values, then the gates. */
EXPORT int geglu(const void *x, void *y, long rows, long width, int is_bf16, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long row = 0; row < rows; row++) BY_KIND(geglu_row, x, y, row, width);
  return 0;
}

INLINE void activate(const void *x, void *y, long first, long last, int is_tanh, int is_bf16) {
  for (long i = first; i < last; i += LANES) {
    floats value = load(x, i, last - i, is_bf16);
    store(y, i, last - i, is_tanh ? gelu_tanh(value, is_bf16) : gelu(value, is_bf16), is_bf16);
  }
}

/* Numbers that a thread takes at a time. */
enum { AT_ONCE = 256 * LANES };

/* y may be x. */
EXPORT int gelu_all(const void *x, void *y, long count, int is_tanh, int is_bf16, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long first = 0; first < count; first += AT_ONCE) {
    long last = smaller(first + AT_ONCE, count);
    is_tanh ? BY_KIND(activate, x, y, first, last, 1) : BY_KIND(activate, x, y, first, last, 0);
  }
  return 0;
}

INLINE void gated_sum_row(const void *x, const void *branch, const float *gate, void *y, long row,
                          long width, int is_branch_bf16, int is_bf16) {
  for (long c = 0; c < width; c += LANES) {
    long count = width - c, i = row * width + c;
    floats by = load(gate, c, count, 0);
    floats value = load(x, i, count, is_bf16) + load(branch, i, count, is_branch_bf16) * by;
    store(y, i, count, value, is_bf16);
  }
}

/* y = x + gate * branch, rows of `width`; row i takes gate i / rows_a_table. y may be x. */
EXPORT int gated_sum(const void *x, const void *branch, const float *gate, void *y, long rows,
                     long width, long rows_a_table, int is_bf16, int is_branch_bf16, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long row = 0; row < rows; row++) {
    const float *own = gate + row / rows_a_table * width;
    is_branch_bf16 ? BY_KIND(gated_sum_row, x, branch, own, y, row, width, 1)
                   : BY_KIND(gated_sum_row, x, branch, own, y, row, width, 0);
  }
  return 0;
}

INLINE void modulate_row(const void *x, const float *scale, const float *shift, void *y, long row,
                         long width, int is_out_bf16, int is_bf16) {
  for (long c = 0; c < width; c += LANES) {
    long count = width - c, i = row * width + c;
    floats value = load(x, i, count, is_bf16) * (1.0f + load(scale, c, count, 0));
    store(y, i, count, value + load(shift, c, count, 0), is_out_bf16);
  }
}

/* y = x (1 + scale) + shift, rows of `width`; row i takes row i / rows_a_table of the tables. y is
   float32 if x is. */
EXPORT int modulate(const void *x, const float *scale, const float *shift, void *y, long rows,
                    long width, long rows_a_table, int is_bf16, int is_out_bf16, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long row = 0; row < rows; row++) {
    long at_table = row / rows_a_table * width;
    const float *by = scale + at_table, *more = shift + at_table;
    is_out_bf16 ? BY_KIND(modulate_row, x, by, more, y, row, width, 1)
                : BY_KIND(modulate_row, x, by, more, y, row, width, 0);
  }
  return 0;
}
