/* A linear layer and the gated GELU after it (GEGLU): what lies between stays in registers.

   The weight is packed into panels in every call, so that nothing is stored between calls. Each
   thread takes some rows at a time. Rows of numbers in bfloat16 are words of two. */

#include "product.h"
#include "transpose.h"

/* Rows that a thread copies at a time, so that they don't share their places in the cache. */
enum { PIECE = 112 / ROWS * ROWS };

typedef struct {
  const uint32_t *x, *weight; /* (rows, depth) and (2 width, depth): words */
  const float *bias;          /* of the values, then of their gates, as in the weight */
  void *y;                    /* (rows, width) */
  long rows, depth, width;
} Gated;

/* Rows of LANES values and their gates, to so many columns from `first` on. */
INLINE void write_gated(const Gated *job, const float *from, long row, long rows, long first,
                        int is_bf16) {
  long count = job->width - first;
  floats to_value = job->bias ? load(job->bias, first, count, 0) : all(0);
  floats to_gate = job->bias ? load(job->bias, job->width + first, count, 0) : all(0);
  for (long r = row; r < row + rows; r++, from += PANEL) {
    floats value = load_lanes(from, 0) + to_value, gate = load_lanes(from + LANES, 0) + to_gate;
    store(job->y, r * job->width + first, count, value * gelu_by_power(gate, is_bf16), is_bf16);
  }
}

static int multiply_gated(const Gated *job, int is_bf16, int threads) {
  long panels = (job->width + LANES - 1) / LANES, step = odd_lines(job->depth);
  long piece = smaller(PIECE, round_up((job->rows + threads - 1) / threads, ROWS));
  uint32_t *weight = scratch_of(panels * job->depth * PANEL);
  uint32_t *scratch = scratch_of(threads * piece * step);
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
      transpose_rows(job->weight + (half * job->width + first) * job->depth, job->depth,
                     job->width - first, job->depth,
                     weight + panel * job->depth * PANEL + half * LANES, PANEL);
    }
#pragma omp for schedule(static)
    for (long row = 0; row < job->rows; row += piece) {
      long rows = smaller(piece, job->rows - row);
      for (long r = 0; r < rows; r++)
        memcpy(a + r * step, job->x + (row + r) * job->depth, job->depth * sizeof(uint32_t));
      memset(a + rows * step, 0, (round_up(rows, ROWS) - rows) * step * sizeof(uint32_t));
      for (long p = 0; p < panels; p++) {
        float c[PIECE * PANEL] __attribute__((aligned(64)));
        const uint32_t *b = weight + p * job->depth * PANEL;
        for (long r = 0; r < rows; r += ROWS)
          BY_KIND(multiply, a + r * step, step, b, job->depth, c + r * PANEL, PANEL, PANEL, 0);
        BY_KIND(write_gated, job, c, row, rows, p * LANES);
      }
    }
  }
  free(weight), free(scratch);
  return 0;
}

/* 0; 1 if there is no memory, 2 if sizes don't suit. `depth` numbers a row, even in bfloat16. */
EXPORT int gated_linear(const void *x, const void *weight, const float *bias, void *y, long rows,
                        long depth, long width, int is_bf16, int threads) {
  if (is_bf16 && (depth % 2 || !CAN_MULTIPLY_HALVES)) return 2;
  Gated job = {x, weight, bias, y, rows, is_bf16 ? depth / 2 : depth, width};
  return multiply_gated(&job, is_bf16, threads);
}
