/* Group norm, and SiLU after it, of samples whose memory is rows of channels (channels last), or
   channels of rows (as torch makes them). Before SiLU, each row of channels may be scaled and
   shifted by a row of a smaller map.

   Statistics are sums of differences from a mean or value nearby, in float32 over a few rows and in
   float64 beyond: squares of a large mean don't cancel, and one value far from the others costs no
   digits but those of its own rows. How rows are cut depends on sizes alone, so the number of
   threads changes no bit. The output may lie where the input does. */

#include "numbers.h"

enum { ROWS_SUMMED = 64, ROWS_A_PIECE = 1024, BLOCK = 4 };

/* Rows of channels of a sample's map, (samples, size, channels), and the one for each row of x. */
typedef struct {
  const void *scale, *shift;
  const long *row;
  long size;
} Map;

/* Adds up to 64 rows of `count` channels, at most BLOCK vectors of them, less `pivot`. */
INLINE void sum_block(const void *x, long rows, long channels, long count,
                      const float *restrict pivot, double *restrict sums, double *restrict squares,
                      int is_bf16) {
  floats first[BLOCK], one[BLOCK], two[BLOCK];
  for (int b = 0; b < BLOCK; b++) {
    first[b] = b * LANES < count ? load(x, b * LANES, count - b * LANES, is_bf16) : all(0);
    one[b] = two[b] = all(0);
  }
  for (long row = 0; row < rows; row++)
    for (int b = 0; b < BLOCK; b++) {
      if (b * LANES >= count) break;
      floats d = load(x, row * channels + b * LANES, count - b * LANES, is_bf16) - first[b];
      one[b] += d;
      two[b] += d * d;
    }
  /* In arrays, whose loop the compiler makes vectors of. */
  float near[BLOCK * LANES], sum[BLOCK * LANES], square[BLOCK * LANES];
  memcpy(near, first, sizeof near);
  memcpy(sum, one, sizeof sum);
  memcpy(square, two, sizeof square);
  for (long c = 0; c < count; c++) {
    double off = (double)near[c] - pivot[c];
    sums[c] += sum[c] + rows * off;
    squares[c] += square[c] + off * (2.0 * sum[c] + rows * off);
  }
}

INLINE void sum_rows(const void *x, long rows, long channels, const float *pivot, double *sums,
                     int is_bf16) {
  memset(sums, 0, 2 * channels * sizeof(double));
  for (long row = 0; row < rows; row += ROWS_SUMMED)
    for (long c = 0; c < channels; c += BLOCK * LANES) {
      const void *from = at(x, row * channels + c, is_bf16);
      long few = smaller(rows - row, ROWS_SUMMED);
      if (channels - c >= BLOCK * LANES)
        sum_block(from, few, channels, BLOCK * LANES, pivot + c, sums + c, sums + channels + c,
                  is_bf16);
      else
        sum_block(from, few, channels, channels - c, pivot + c, sums + c, sums + channels + c,
                  is_bf16);
    }
}

/* Rounding can leave a variance of zero just below it; NaN stays. */
static double inverse_root(double variance, double eps) {
  return 1 / sqrt((variance < 0 ? 0 : variance) + eps);
}

/* Each channel's factor and summand, from sums over `count` values of each. */
static void factors(const double *restrict sums, const float *restrict pivot, long count,
                    long channels, long groups, const float *restrict weight,
                    const float *restrict bias, double eps, float *restrict scale,
                    float *restrict shift) {
  long size = channels / groups;
  double part = 1.0 / count;
  for (long g = 0; g < groups; g++) {
    double mean = 0, squares = 0;
    for (long c = g * size; c < (g + 1) * size; c++) mean += pivot[c] + sums[c] * part;
    mean /= size;
    for (long c = g * size; c < (g + 1) * size; c++) {
      double off = pivot[c] + sums[c] * part - mean;
      squares += sums[channels + c] - sums[c] * sums[c] * part + count * off * off;
    }
    double inverse = inverse_root(squares / ((double)count * size), eps);
    for (long c = g * size; c < (g + 1) * size; c++) {
      scale[c] = (float)(inverse * weight[c]);
      shift[c] = (float)(bias[c] - mean * inverse * weight[c]);
    }
  }
}

/* Scale and shift some rows of sample n, by the map too, and apply SiLU. */
INLINE void map_rows(const void *x, void *y, long n, long first, long last, long rows,
                     long channels, const float *scale, const float *shift, const Map *map,
                     int has_map, int is_silu, int is_bf16) {
  for (long row = first; row < last; row++) {
    long at_map = has_map ? (n * map->size + map->row[row]) * channels : 0;
    for (long c = 0; c < channels; c += LANES) {
      long count = channels - c, place = (n * rows + row) * channels + c;
      floats value =
          load(x, place, count, is_bf16) * load(scale, c, count, 0) + load(shift, c, count, 0);
      if (has_map)
        value = value * load(map->scale, at_map + c, count, is_bf16) +
                load(map->shift, at_map + c, count, is_bf16);
      store(y, place, count, is_silu ? silu(value, is_bf16) : value, is_bf16);
    }
  }
}

static int rows_of_channels(const void *x, void *y, long samples, long rows, long channels,
                            long groups, const float *weight, const float *bias, double eps,
                            Map map, int is_silu, int is_bf16, int threads) {
  long pieces = (rows + ROWS_A_PIECE - 1) / ROWS_A_PIECE, work = samples * pieces;
  double *sums = malloc(work * 2 * channels * sizeof(double));
  float *scratch = malloc(samples * 3 * channels * sizeof(float));
  if (!sums || !scratch) {
    free(sums), free(scratch);
    return 1;
  }
  float *pivot = scratch, *scale = pivot + samples * channels, *shift = scale + samples * channels;
  for (long n = 0; n < samples; n++)
    for (long c = 0; c < channels; c++)
      pivot[n * channels + c] = get(x, n * rows * channels + c, is_bf16);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
#pragma omp for schedule(static)
    for (long i = 0; i < work; i++) {
      long n = i / pieces, first = i % pieces * ROWS_A_PIECE;
      BY_KIND(sum_rows, at(x, (n * rows + first) * channels, is_bf16),
              smaller(rows - first, ROWS_A_PIECE), channels, pivot + n * channels,
              sums + i * 2 * channels);
    }
#pragma omp for schedule(static)
    for (long n = 0; n < samples; n++) {
      double *total = sums + n * pieces * 2 * channels;
      for (long i = 1; i < pieces; i++)
        for (long c = 0; c < 2 * channels; c++) total[c] += total[i * 2 * channels + c];
      factors(total, pivot + n * channels, rows, channels, groups, weight, bias, eps,
              scale + n * channels, shift + n * channels);
    }
#pragma omp for schedule(static)
    for (long i = 0; i < work; i++) {
      long n = i / pieces, first = i % pieces * ROWS_A_PIECE;
      long last = smaller(first + ROWS_A_PIECE, rows);
      const float *by = scale + n * channels, *more = shift + n * channels;
#define CALL(has_map, is_silu) \
  BY_KIND(map_rows, x, y, n, first, last, rows, channels, by, more, &map, has_map, is_silu)
      if (is_silu)
        map.row ? CALL(1, 1) : CALL(0, 1);
      else
        map.row ? CALL(1, 0) : CALL(0, 0);
#undef CALL
    }
  }
  free(sums), free(scratch);
  return 0;
}

/* A group of a sample, whose numbers lie side by side: its channels, one after the other. */
INLINE void norm_group(const void *from, void *to, long size, long rows, const float *weight,
                       const float *bias, double eps, int is_silu, int is_bf16) {
  long count = size * rows;
  float pivot = get(from, 0, is_bf16);
  double one = 0, two = 0;
  for (long start = 0; start < count; start += 1024) {
    long stop = smaller(start + 1024, count), many = stop - start;
    float near = get(from, start, is_bf16);
    floats s = all(0), q = all(0);
    for (long j = start; j < stop; j += LANES)
      s += first_lanes(load(from, j, stop - j, is_bf16) - near, stop - j);
    near += sum_lanes(s) / many;
    s = all(0);
    for (long j = start; j < stop; j += LANES) {
      floats d = first_lanes(load(from, j, stop - j, is_bf16) - near, stop - j);
      s += d;
      q += d * d;
    }
    double off = (double)near - pivot, sum = sum_lanes(s);
    one += sum + many * off;
    two += sum_lanes(q) + off * (2 * sum + many * off);
  }
  double mean = pivot + one / count;
  double inverse = inverse_root((two - one * one / count) / count, eps);
  for (long c = 0; c < size; c++) {
    float a = (float)(inverse * weight[c]);
    float b = (float)(bias[c] - mean * inverse * weight[c]);
    for (long j = 0; j < rows; j += LANES) {
      floats value = load(from, c * rows + j, rows - j, is_bf16) * a + b;
      store(to, c * rows + j, rows - j, is_silu ? silu(value, is_bf16) : value, is_bf16);
    }
  }
}

static void channels_of_rows(const void *x, void *y, long samples, long rows, long channels,
                             long groups, const float *weight, const float *bias, double eps,
                             int is_silu, int is_bf16, int threads) {
  long size = channels / groups;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long i = 0; i < samples * groups; i++) {
    const void *from = at(x, i * size * rows, is_bf16);
    void *to = at_out(y, i * size * rows, is_bf16);
    const float *by = weight + i % groups * size, *more = bias + i % groups * size;
    is_silu ? BY_KIND(norm_group, from, to, size, rows, by, more, eps, 1)
            : BY_KIND(norm_group, from, to, size, rows, by, more, eps, 0);
  }
}

/* 0, or 1 if there is no memory. x and y hold samples * rows * channels numbers. A map is for
   channels last, in the dtype of x; without one `map_row` is NULL. */
EXPORT int group_norm(const void *x, void *y, long samples, long rows, long channels, long groups,
                      const float *weight, const float *bias, double eps, const void *scale,
                      const void *shift, const long *map_row, long map_size, int is_silu,
                      int is_channels_last, int is_bf16, int threads) {
  Map map = {scale, shift, map_row, map_size};
  if (is_channels_last)
    return rows_of_channels(x, y, samples, rows, channels, groups, weight, bias, eps, map, is_silu,
                            is_bf16, threads);
  channels_of_rows(x, y, samples, rows, channels, groups, weight, bias, eps, is_silu, is_bf16,
                   threads);
  return 0;
}
