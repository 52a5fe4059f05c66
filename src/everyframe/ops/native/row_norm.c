/* Layer norm and RMS norm of rows; y may be x.

   Row i takes row i / rows_a_table of the weights and biases (tables, width). */

#include "numbers.h"

/* Most registers that hold a row, and rows that a thread norms at a time. */
enum { HELD = 8, ROWS_AT_ONCE = 16 };

/* One row of `width` numbers, which `held` registers hold; with 0 it is read three times.
   `is_whole`: the last vector is as long as the others. */
INLINE void norm_row(const void *from, void *to, long width, const float *weight,
                     const float *bias, float eps, int is_rms, int held, int is_whole,
                     int is_bf16) {
  floats values[HELD], near = all(0), far = all(0);
  long vectors = held ? held : (width + LANES - 1) / LANES;
#define IS_FULL(v) (is_whole || v < vectors - 1)
#define COUNT(v) (IS_FULL(v) ? LANES : width - v * LANES)
#define VALUE(v) (held ? values[v] : load(from, v * LANES, COUNT(v), is_bf16))
#define FIRST(v, x) (IS_FULL(v) ? (x) : first_lanes(x, COUNT(v)))
  for (int v = 0; v < held; v++) values[v] = load(from, v * LANES, COUNT(v), is_bf16);
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
    floats value = (VALUE(v) - mean) * inverse;
    if (weight) value *= load(weight, v * LANES, COUNT(v), 0);
    if (bias) value += load(bias, v * LANES, COUNT(v), 0);
    store(to, v * LANES, COUNT(v), value, is_bf16);
  }
#undef IS_FULL
#undef COUNT
#undef VALUE
#undef FIRST
}

typedef struct {
  const void *x;
  void *y;
  long rows, width;
  const float *weights, *biases;
  long rows_a_table;
  float eps;
} Norm;

/* The weights or biases of a row; a division takes as long as half of a short row. */
INLINE const float *table_of(const Norm *norm, const float *tables, long row) {
  int has_one = norm->rows_a_table >= norm->rows;
  return !tables || has_one ? tables : tables + row / norm->rows_a_table * norm->width;
}

INLINE void norm_rows(const Norm *norm, long first, long last, int is_rms, int held, int is_whole,
                      int is_bf16) {
  for (long row = first; row < last; row++)
    norm_row(at(norm->x, row * norm->width, is_bf16), at_out(norm->y, row * norm->width, is_bf16),
             norm->width, table_of(norm, norm->weights, row), table_of(norm, norm->biases, row),
             norm->eps, is_rms, held, is_whole, is_bf16);
}

static void norm_some(const Norm *norm, long first, long last, int is_rms, int is_bf16) {
#define NORM(held, is_whole)                                                                   \
  (is_rms ? BY_KIND(norm_rows, norm, first, last, 1, held, is_whole)                           \
          : BY_KIND(norm_rows, norm, first, last, 0, held, is_whole))
#define HOLD(held) norm->width % LANES ? NORM(held, 0) : NORM(held, 1)
  switch (smaller((norm->width + LANES - 1) / LANES, HELD + 1)) {
  case 1: HOLD(1); break;
  case 2: HOLD(2); break;
  case 3: HOLD(3); break;
  case 4: HOLD(4); break;
  case 5: HOLD(5); break;
  case 6: HOLD(6); break;
  case 7: HOLD(7); break;
  case 8: HOLD(8); break;
  default: HOLD(0);
  }
#undef HOLD
#undef NORM
}

EXPORT int row_norm(const void *x, void *y, long rows, long width, const float *weights,
                    const float *biases, long rows_a_table, double eps, int is_rms, int is_bf16,
                    int threads) {
  Norm norm = {x, y, rows, width, weights, biases, rows_a_table, (float)eps};
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long first = 0; first < rows; first += ROWS_AT_ONCE)
    norm_some(&norm, first, smaller(first + ROWS_AT_ONCE, rows), is_rms, is_bf16);
  return 0;
}
