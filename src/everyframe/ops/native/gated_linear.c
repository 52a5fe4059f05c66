/* A linear layer and the gated GELU after it (GEGLU): what lies between stays in registers.

   The weight is packed into panels in every call, so that nothing is stored between calls. Each
   thread takes some rows at a time. Rows of numbers in bfloat16 are words of two. */

#include "product.h"

/* Rows that a thread copies at a time, so that they don't share their places in the cache. */
enum { PIECE = 8 * ROWS };

typedef struct {
  const uint32_t *x, *weight; /* (rows, depth) and (2 width, depth): words */
  const float *bias;          /* of the values, then of their gates, as in the weight */
  void *y;                    /* (rows, width) */
  long rows, depth, width;
} Gated;

/* A block of LANES by LANES words, its rows `step` apart, transposed. */
INLINE void transpose(const uint32_t *from, long step, uint32_t *to, long to_step) {
#ifdef CAN_SHUFFLE
  words a[LANES], b[LANES];
  for (int i = 0; i < LANES; i++) memcpy(&a[i], from + i * step, sizeof a[i]);
  /* Blocks of eight by eight words change places with their opposites, then smaller ones. */
#define ROUND(in, out, width, LOW, HIGH)                                      \
  for (int i = 0; i < LANES; i++)                                             \
    if (!(i & width)) {                                                       \
      out[i] = __builtin_shufflevector(in[i], in[i + width], LOW);            \
      out[i + width] = __builtin_shufflevector(in[i], in[i + width], HIGH);   \
    }
#define LOW_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define HIGH_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define LOW_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define HIGH_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define LOW_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define HIGH_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define LOW_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define HIGH_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
  ROUND(a, b, 8, LOW_8, HIGH_8)
  ROUND(b, a, 4, LOW_4, HIGH_4)
  ROUND(a, b, 2, LOW_2, HIGH_2)
  ROUND(b, a, 1, LOW_1, HIGH_1)
#undef ROUND
  for (int i = 0; i < LANES; i++) memcpy(to + i * to_step, &a[i], sizeof a[i]);
#else
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) to[j * to_step + i] = from[i * step + j];
#endif
}

/* LANES rows of the weight from `first` on, of which `count` exist, as columns of a panel. */
INLINE void pack(const Gated *job, long first, long count, uint32_t *to) {
  for (long k = 0; k < job->depth; k += LANES) {
    const uint32_t *from = job->weight + first * job->depth + k;
    long few = smaller(job->depth - k, LANES);
    if (count >= LANES && few == LANES) {
      transpose(from, job->depth, to + k * PANEL, PANEL);
      continue;
    }
    for (long i = 0; i < few; i++)
      for (long lane = 0; lane < LANES; lane++)
        to[(k + i) * PANEL + lane] = lane < count ? from[lane * job->depth + i] : 0;
  }
}

/* Rows of LANES values and their gates, to so many columns from `first` on. */
INLINE void write_gated(const Gated *job, const float *from, long row, long rows, long first,
                        int is_bf16) {
  long count = job->width - first;
  floats to_value = job->bias ? load(job->bias, first, count, 0) : all(0);
  floats to_gate = job->bias ? load(job->bias, job->width + first, count, 0) : all(0);
  for (long r = row; r < row + rows; r++, from += PANEL) {
    floats value = load16(from, 0) + to_value, gate = load16(from + LANES, 0) + to_gate;
    store(job->y, r * job->width + first, count, value * gelu_by_power(gate), is_bf16);
  }
}

INLINE int multiply_gated(const Gated *job, int is_bf16, int threads) {
  long panels = (job->width + LANES - 1) / LANES, step = odd_lines(job->depth);
  long piece = smaller(PIECE, round_up((job->rows + threads - 1) / threads, ROWS));
  uint32_t *weight = aligned_alloc(64, panels * job->depth * PANEL * sizeof(uint32_t));
  uint32_t *scratch = aligned_alloc(64, threads * piece * step * sizeof(uint32_t));
  if (!weight || !scratch) {
    free(weight), free(scratch);
    return 1;
  }
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    uint32_t *a = scratch + this_thread() * piece * step;
#pragma omp for schedule(static)
    for (long i = 0; i < panels * COLUMNS; i++) {
      long panel = i / COLUMNS, first = panel * LANES, half = i % COLUMNS;
      pack(job, half * job->width + first, job->width - first,
           weight + panel * job->depth * PANEL + half * LANES);
    }
#pragma omp for schedule(static)
    for (long row = 0; row < job->rows; row += piece) {
      long rows = smaller(piece, job->rows - row);
      for (long r = 0; r < rows; r++)
        memcpy(a + r * step, job->x + (row + r) * job->depth, job->depth * sizeof(uint32_t));
      memset(a + rows * step, 0, (round_up(rows, ROWS) - rows) * step * sizeof(uint32_t));
      for (long p = 0; p < panels; p++)
        for (long r = 0; r < rows; r += ROWS) {
          float c[ROWS * PANEL] __attribute__((aligned(64)));
          const uint32_t *b = weight + p * job->depth * PANEL;
#ifdef HAS_HALVES
          if (is_bf16)
            product_halves(a + r * step, step, b, job->depth, c, PANEL);
          else
#endif
            product((const float *)a + r * step, step, (const float *)b, job->depth, c, PANEL);
          write_gated(job, c, row + r, smaller(ROWS, rows - r), p * LANES, is_bf16);
        }
    }
  }
  free(weight), free(scratch);
  return 0;
}

/* Whether products of bfloat16 are computed here. */
EXPORT int has_halves(void) {
#ifdef HAS_HALVES
  return 1;
#else
  return 0;
#endif
}

/* 0; 1 if there is no memory, 2 if sizes don't suit. `depth` numbers a row, even in bfloat16. */
EXPORT int gated_linear(const void *x, const void *weight, const float *bias, void *y, long rows,
                        long depth, long width, int is_bf16, int threads) {
  if (is_bf16 && (depth % 2 || !has_halves())) return 2;
  Gated job = {x, weight, bias, y, rows, is_bf16 ? depth / 2 : depth, width};
  return is_bf16 ? multiply_gated(&job, 1, threads) : multiply_gated(&job, 0, threads);
}
