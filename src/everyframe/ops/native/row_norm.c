/* Layer norm and RMS norm of rows; y may be x.

   Row i takes row i / rows_a_table of the weights and biases (tables, width). */

#include "numbers.h"

/* Most registers that hold a row. */
enum { HELD = 16 };

/* One row of `width` numbers; with `held` registers for it, 0 for a row that is read three times. */
INLINE void norm_row(const void *from, void *to, long width, const float *weight,
                     const float *bias, float eps, int is_rms, int held, int is_bf16) {
  floats values[HELD], near = all(0), far = all(0);
  long vectors = held ? held : (width + LANES - 1) / LANES;
#define VALUE(v) \
  (held ? values[v] : load(from, (v) * LANES, width - (v) * LANES, is_bf16))
#define FIRST(v, x) (held ? (x) : first_lanes(x, width - (v) * LANES))
  for (int v = 0; v < held; v++) values[v] = load_lanes(at(from, v * LANES, is_bf16), is_bf16);
  float mean = 0;
  if (!is_rms) {
    /* From the first value, so that a large mean costs no digits. */
    float pivot = get(from, 0, is_bf16);
    for (long v = 0; v < vectors; v++) near += FIRST(v, VALUE(v) - pivot);
    mean = sum_lanes(near) / width + pivot;
  }
  for (long v = 0; v < vectors; v++) {
    floats d = FIRST(v, VALUE(v) - mean);
    far += d * d;
  }
  float inverse = 1 / sqrtf(sum_lanes(far) / width + eps);
  for (long v = 0; v < vectors; v++) {
    long c = v * LANES, count = held ? LANES : width - c;
    floats value = (VALUE(v) - mean) * inverse;
    if (weight) value *= load(weight, c, count, 0);
    if (bias) value += load(bias, c, count, 0);
    store(to, c, count, value, is_bf16);
  }
#undef VALUE
#undef FIRST
}

INLINE void row_norm_of(const void *x, void *y, long rows, long width, const float *weights,
                        const float *biases, long rows_a_table, float eps, int is_rms, int is_bf16,
                        int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long row = 0; row < rows; row++) {
    const float *weight = weights ? weights + row / rows_a_table * width : NULL;
    const float *bias = biases ? biases + row / rows_a_table * width : NULL;
    const void *from = at(x, row * width, is_bf16);
    void *to = at_out(y, row * width, is_bf16);
#define NORM(held) norm_row(from, to, width, weight, bias, eps, is_rms, held, is_bf16)
    if (width == 4 * LANES)
      NORM(4);
    else if (width == 8 * LANES)
      NORM(8);
    else if (width == 16 * LANES)
      NORM(16);
    else
      NORM(0);
#undef NORM
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
