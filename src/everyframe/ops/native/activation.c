/* GELU, the gated GELU of feed-forwards (GEGLU), and the modulation and gated sum of a stream. */

#include "numbers.h"

INLINE void geglu_of(const void *x, void *y, long rows, long width, int is_bf16, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long row = 0; row < rows; row++)
    for (long c = 0; c < width; c += LANES) {
      long count = width - c, at_value = row * 2 * width + c;
      floats value = load(x, at_value, count, is_bf16);
      floats gate = load(x, at_value + width, count, is_bf16);
      store(y, row * width + c, count, value * gelu(gate, is_bf16), is_bf16);
    }
}

/* y (rows, width) = value * gelu(gate) of x (rows, 2 width), which holds the values, then the gates. */
EXPORT int geglu(const void *x, void *y, long rows, long width, int is_bf16, int threads) {
  if (is_bf16)
    geglu_of(x, y, rows, width, 1, threads);
  else
    geglu_of(x, y, rows, width, 0, threads);
  return 0;
}

INLINE void activate(const void *x, void *y, long count, int is_tanh, int is_bf16, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long i = 0; i < count; i += LANES) {
    floats value = load(x, i, count - i, is_bf16);
    store(y, i, count - i, is_tanh ? gelu_tanh(value, is_bf16) : gelu(value, is_bf16), is_bf16);
  }
}

/* y may be x. */
EXPORT int gelu_all(const void *x, void *y, long count, int is_tanh, int is_bf16, int threads) {
  if (is_tanh)
    is_bf16 ? activate(x, y, count, 1, 1, threads) : activate(x, y, count, 1, 0, threads);
  else
    is_bf16 ? activate(x, y, count, 0, 1, threads) : activate(x, y, count, 0, 0, threads);
  return 0;
}

INLINE void gated_sum_of(const void *x, const void *branch, const float *gate, void *y, long rows,
                         long width, long rows_a_table, int is_bf16, int is_branch_bf16,
                         int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long row = 0; row < rows; row++) {
    long at_table = row / rows_a_table * width;
    for (long c = 0; c < width; c += LANES) {
      long count = width - c, i = row * width + c;
      floats by = load(gate, at_table + c, count, 0);
      floats value = load(x, i, count, is_bf16) + load(branch, i, count, is_branch_bf16) * by;
      store(y, i, count, value, is_bf16);
    }
  }
}

/* y = x + gate * branch, rows of `width`; row i takes gate i / rows_a_table. y may be x. */
EXPORT int gated_sum(const void *x, const void *branch, const float *gate, void *y, long rows,
                     long width, long rows_a_table, int is_bf16, int is_branch_bf16, int threads) {
  if (is_bf16)
    is_branch_bf16 ? gated_sum_of(x, branch, gate, y, rows, width, rows_a_table, 1, 1, threads)
                   : gated_sum_of(x, branch, gate, y, rows, width, rows_a_table, 1, 0, threads);
  else
    is_branch_bf16 ? gated_sum_of(x, branch, gate, y, rows, width, rows_a_table, 0, 1, threads)
                   : gated_sum_of(x, branch, gate, y, rows, width, rows_a_table, 0, 0, threads);
  return 0;
}

INLINE void modulate_of(const void *x, const float *scale, const float *shift, void *y, long rows,
                        long width, long rows_a_table, int is_bf16, int is_out_bf16, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long row = 0; row < rows; row++) {
    long at_table = row / rows_a_table * width;
    for (long c = 0; c < width; c += LANES) {
      long count = width - c, i = row * width + c;
      floats value = load(x, i, count, is_bf16) * (1.0f + load(scale, at_table + c, count, 0));
      store(y, i, count, value + load(shift, at_table + c, count, 0), is_out_bf16);
    }
  }
}

/* y = x (1 + scale) + shift, rows of `width`; row i takes row i / rows_a_table of the tables. */
EXPORT int modulate(const void *x, const float *scale, const float *shift, void *y, long rows,
                    long width, long rows_a_table, int is_bf16, int is_out_bf16, int threads) {
  if (is_bf16)
    is_out_bf16 ? modulate_of(x, scale, shift, y, rows, width, rows_a_table, 1, 1, threads)
                : modulate_of(x, scale, shift, y, rows, width, rows_a_table, 1, 0, threads);
  else
    modulate_of(x, scale, shift, y, rows, width, rows_a_table, 0, 0, threads);
  return 0;
}
