/* Attention over the few frames of each pixel, where the frames of a pixel lie far apart.

   Numbers are (batches, frames, pixels, heads * 16 n), by strides: nothing is transposed in memory. */

#include "numbers.h"

enum { MOST_FRAMES = 64, MOST_WIDTH = 128, TOGETHER = 8 };

/* Eight queries at a time: sums of `rows` x LANES, each over `depth` products. */
INLINE void products(const float *left, long left_step, const float *right, long right_step,
                     long depth, floats *sums) {
  for (int r = 0; r < TOGETHER; r++) sums[r] = all(0);
  for (long k = 0; k < depth; k++) {
    floats values = load_lanes(right + k * right_step, 0);
    for (int r = 0; r < TOGETHER; r++) sums[r] += left[r * left_step + k] * values;
  }
}

INLINE void one_head(const void *q, const void *k, const void *v, void *y, long frames, long step,
                     long out_step, long width, float scale, int is_bf16) {
  float queries[MOST_FRAMES][MOST_WIDTH], keys[MOST_WIDTH][MOST_FRAMES];
  float values[MOST_FRAMES][MOST_WIDTH], scores[MOST_FRAMES][MOST_FRAMES];
  long padded = (frames + LANES - 1) / LANES * LANES;
  for (long j = 0; j < padded; j++)
    for (long d = 0; d < width; d += LANES) {
      long from = smaller(j, frames - 1) * step + d; /* the last again, and left out below */
      floats key = load_lanes(at(k, from, is_bf16), is_bf16);
      store_lanes(&queries[j][d], load_lanes(at(q, from, is_bf16), is_bf16) * scale, 0);
      store_lanes(&values[j][d], load_lanes(at(v, from, is_bf16), is_bf16), 0);
      for (int l = 0; l < LANES; l++) keys[d + l][j] = key[l];
    }
  floats sums[TOGETHER];
  for (long i = 0; i < frames; i += TOGETHER)
    for (long j = 0; j < padded; j += LANES) {
      products(queries[i], MOST_WIDTH, &keys[0][j], MOST_FRAMES, width, sums);
      for (int r = 0; r < TOGETHER; r++) store_lanes(&scores[i + r][j], sums[r], 0);
    }
  for (long i = 0; i < frames; i++) {
    float most = scores[i][0];
    for (long j = 1; j < frames; j++) most = scores[i][j] > most ? scores[i][j] : most;
    floats total = all(0);
    for (long j = 0; j < padded; j += LANES) {
      floats each = first_lanes(exponential(load_lanes(&scores[i][j], 0) - most, 0), frames - j);
      store_lanes(&scores[i][j], each, 0);
      total += each;
    }
    floats inverse = all(1 / sum_lanes(total));
    for (long j = 0; j < padded; j += LANES)
      store_lanes(&scores[i][j], load_lanes(&scores[i][j], 0) * inverse, 0);
  }
  for (long i = 0; i < frames; i += TOGETHER)
    for (long d = 0; d < width; d += LANES) {
      products(scores[i], MOST_FRAMES, &values[0][d], MOST_WIDTH, frames, sums);
      for (long r = 0; r < smaller(TOGETHER, frames - i); r++)
        store_lanes(at_out(y, (i + r) * out_step + d, is_bf16), sums[r], is_bf16);
    }
}

/* y (batches, frames, pixels, heads * width); q, k and v start in rows of `in_width` numbers. */
EXPORT int frame_attention(const void *q, const void *k, const void *v, void *y, long batches,
                           long frames, long pixels, long heads, long width, long in_width,
                           double scale, int is_bf16, int threads) {
  if (frames > MOST_FRAMES || width > MOST_WIDTH || width % LANES) return 2;
  long out_width = heads * width, step = pixels * in_width, out_step = pixels * out_width;
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
  for (long i = 0; i < batches * pixels; i++) {
    long place = i / pixels * frames * pixels + i % pixels;
    for (long h = 0; h < heads; h++) {
      long from = place * in_width + h * width;
      const void *own_q = at(q, from, is_bf16), *own_k = at(k, from, is_bf16);
      const void *own_v = at(v, from, is_bf16);
      void *to = at_out(y, place * out_width + h * width, is_bf16);
#define CALL(wide) \
  BY_KIND(one_head, own_q, own_k, own_v, to, frames, step, out_step, wide, (float)scale)
      width == 64 ? CALL(64) : CALL(width);
#undef CALL
    }
  }
  return 0;
}
