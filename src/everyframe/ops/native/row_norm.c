/* Layer norm and RMS norm of rows, with modulation by a scale and a shift after it. */

#include "numbers.h"

/* Row i takes the scale and shift of number i / rows_a_table. */
INLINE void row_norm_of(const void *x, void *y, long rows, long width, const float *weight,
                        const float *bias, const float *scale, const float *shift,
                        long rows_a_table, float eps, int is_rms, int is_bf16, int is_out_bf16,
                        int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long row = 0; row < rows; row++) {
    const void *from = at(x, row * width, is_bf16);
    void *to = at_out(y, row * width, is_out_bf16);
    const float *scales = scale ? scale + row / rows_a_table * width : 0;
    const float *shifts = shift ? shift + row / rows_a_table * width : 0;
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
      if (scales) value *= 1 + load(scales, c, count, 0);
      if (shifts) value += load(shifts, c, count, 0);
      store(to, c, count, value, is_out_bf16);
    }
  }
}

EXPORT int row_norm(const void *x, void *y, long rows, long width, const float *weight,
                    const float *bias, const float *scale, const float *shift, long rows_a_table,
                    double eps, int is_rms, int is_bf16, int is_out_bf16, int threads) {
#define CALL(rms, bf16, out)                                                                      \
  row_norm_of(x, y, rows, width, weight, bias, scale, shift, rows_a_table, (float)eps, rms, bf16, \
              out, threads)
  if (is_rms)
    is_bf16 ? CALL(1, 1, 1) : is_out_bf16 ? CALL(1, 0, 1) : CALL(1, 0, 0);
  else
    is_bf16 ? CALL(0, 1, 1) : is_out_bf16 ? CALL(0, 0, 1) : CALL(0, 0, 0);
  return 0;
#undef CALL
}
