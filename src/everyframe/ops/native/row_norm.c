/* Layer norm and RMS norm of rows; y may be x.

   Row i takes row i / rows_a_table of the weights and biases (tables, width). */

#include "numbers.h"

INLINE void row_norm_of(const void *x, void *y, long rows, long width, const float *weights,
                        const float *biases, long rows_a_table, float eps, int is_rms, int is_bf16,
                        int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long row = 0; row < rows; row++) {
    const float *weight = weights ? weights + row / rows_a_table * width : NULL;
    const float *bias = biases ? biases + row / rows_a_table * width : NULL;
    const void *from = at(x, row * width, is_bf16);
    void *to = at_out(y, row * width, is_bf16);
    floats near = all(0), far = all(0);
    float mean = 0;
    if (!is_rms) {
      /* From the first value, so that a large mean costs no digits. */
      float pivot = get(from, 0, is_bf16);
      for (long c = 0; c < width; c += LANES)
        near += first_lanes(load(from, c, width - c, is_bf16) - pivot, width - c);
      mean = sum_lanes(near) / width + pivot;
    }
    for (long c = 0; c < width; c += LANES) {
      floats d = first_lanes(load(from, c, width - c, is_bf16) - mean, width - c);
      far += d * d;
    }
    float inverse = 1 / sqrtf(sum_lanes(far) / width + eps);
    for (long c = 0; c < width; c += LANES) {
      long count = width - c;
      floats value = (load(from, c, count, is_bf16) - mean) * inverse;
      if (weight) value *= load(weight, c, count, 0);
      if (bias) value += load(bias, c, count, 0);
      store(to, c, count, value, is_bf16);
    }
  }
}

EXPORT int row_norm(const void *x, void *y, long rows, long width, const float *weights,
                    const float *biases, long rows_a_table, double eps, int is_rms, int is_bf16,
                    int threads) {
#define CALL(rms, bf16) \
  row_norm_of(x, y, rows, width, weights, biases, rows_a_table, (float)eps, rms, bf16, threads)
  if (is_rms)
    is_bf16 ? CALL(1, 1) : CALL(1, 0);
  else
    is_bf16 ? CALL(0, 1) : CALL(0, 0);
  return 0;
#undef CALL
}
