/* A product of matrices in registers: some rows, read where they lie, times a panel of columns.

   A panel holds the columns' numbers side by side, row after row. Numbers are float32, or two
   bfloat16 in a word, which AVX512-BF16 multiplies and adds to one float32. */

#pragma once

#include "numbers.h"

#ifdef __AVX512BF16__
#define HAS_HALVES
enum { CAN_MULTIPLY_HALVES = 1 };
#else
enum { CAN_MULTIPLY_HALVES = 0 };
#endif

#ifdef _OPENMP
int omp_get_thread_num(void);
INLINE int this_thread(void) { return omp_get_thread_num(); }
#else
INLINE int this_thread(void) { return 0; }
#endif

/* What registers hold: 32 of AVX-512, else 16. */
#if LANES == 16
enum { ROWS = 14, COLUMNS = 2 };
#else
enum { ROWS = 6, COLUMNS = 2 };
#endif
enum { PANEL = COLUMNS * LANES };

/* ROWS rows of a times the first columns of a panel of b, so many registers wide, alone or added to
   what is in c. */
INLINE void product(const float *a, long a_step, const float *b, long depth, float *c, long c_step,
                    int columns, int is_added) {
  floats sum[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < columns; j++)
      sum[r][j] = is_added ? load_lanes(c + r * c_step + j * LANES, 0) : all(0);
  for (long k = 0; k < depth; k++) {
    floats own[COLUMNS];
    for (int j = 0; j < columns; j++) own[j] = load_lanes(b + k * PANEL + j * LANES, 0);
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int j = 0; j < columns; j++) sum[r][j] += all(a[r * a_step + k]) * own[j];
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < columns; j++)
      memcpy(c + r * c_step + j * LANES, &sum[r][j], sizeof sum[r][j]);
}

#ifdef HAS_HALVES
/* The same of words of two bfloat16. */
INLINE void product_halves(const uint32_t *a, long a_step, const uint32_t *b, long depth, float *c,
                           long c_step, int columns, int is_added) {
  __m512 sum[ROWS][COLUMNS];
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < columns; j++)
      sum[r][j] = is_added ? _mm512_loadu_ps(c + r * c_step + j * LANES) : _mm512_setzero_ps();
  for (long k = 0; k < depth; k++) {
    __m512i own[COLUMNS];
    for (int j = 0; j < columns; j++) own[j] = _mm512_loadu_si512(b + k * PANEL + j * LANES);
#pragma GCC unroll 14
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
      for (int j = 0; j < columns; j++)
        sum[r][j] = _mm512_dpbf16_ps(sum[r][j],
                                     (__m512bh)_mm512_set1_epi32((int)a[r * a_step + k]),
                                     (__m512bh)own[j]);
  }
  for (int r = 0; r < ROWS; r++)
    for (int j = 0; j < columns; j++) _mm512_storeu_ps(c + r * c_step + j * LANES, sum[r][j]);
}
#endif

/* The same of words of either kind; `columns` is a constant. */
INLINE void multiply_columns(const uint32_t *a, long a_step, const uint32_t *b, long depth,
                             float *c, long c_step, int columns, int is_added, int is_bf16) {
#ifdef HAS_HALVES
  if (is_bf16) {
    product_halves(a, a_step, b, depth, c, c_step, columns, is_added);
    return;
  }
#endif
  (void)is_bf16;
  product((const float *)a, a_step, (const float *)b, depth, c, c_step, columns, is_added);
}

/* The same for so many columns, of which a panel may have more. */
INLINE void multiply(const uint32_t *a, long a_step, const uint32_t *b, long depth, float *c,
                     long c_step, long columns, int is_added, int is_bf16) {
  if (columns > LANES)
    multiply_columns(a, a_step, b, depth, c, c_step, COLUMNS, is_added, is_bf16);
  else
    multiply_columns(a, a_step, b, depth, c, c_step, 1, is_added, is_bf16);
}

enum { LINE = 16 };

/* Rounded up to an odd number of cache lines: planes so far apart don't share places in the cache. */
static long odd_lines(long number) { return ((number + LINE - 1) / LINE | 1) * LINE; }

static long round_up(long number, long multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

/* Memory for so many words, or NULL. Its size is one of whole lines: macOS has none of others. */
static void *scratch_of(long number) {
  return aligned_alloc(LINE * sizeof(uint32_t), round_up(number, LINE) * sizeof(uint32_t));
}

/* Whether products of bfloat16 are computed here. */
EXPORT int has_halves(void) { return CAN_MULTIPLY_HALVES; }
