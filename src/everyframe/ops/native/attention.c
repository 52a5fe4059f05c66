/* Softmax attention in blocks of keys, without the matrix of scores (FlashAttention, Dao et al. 2022).

   A thread takes some queries of one head. Keys and values of a block are packed into panels; in
   bfloat16, products are of two numbers in a word, and shares of the softmax are rounded to it. */

#include "product.h"
#include "transpose.h"

enum { KEYS = 256, QUERIES = 448 / ROWS * ROWS, PARTS = 7 };

typedef struct {
  long batch, head, token; /* numbers from one to the next */
} Strides;

typedef struct {
  const void *q, *k, *v;
  void *y; /* (batch, queries, heads, width) */
  Strides of_q, of_k, of_v;
  long heads, queries, keys, width;
  float scale; /* of scores that are exponents of two */
} Attention;

/* What a thread holds of its queries: rows, their largest scores, sums of shares and results. */
typedef struct {
  uint32_t *rows, *keys, *values, *shares;
  float *scores, *sums, *results;
  float largest[QUERIES];
} Block;

/* Two rows of numbers side by side, as words of two, or one row of float32. */
INLINE void pack_values(const Attention *job, const void *v, long count, uint32_t *to,
                        int is_bf16) {
  long width = round_up(job->width, PANEL), deep = round_up(count, 2) / (is_bf16 ? 2 : 1);
  for (long c = 0; c < width; c += LANES)
    for (long i = 0; i < deep; i++) {
      words value = {0}, after = {0};
      long few = job->width - c, row = is_bf16 ? 2 * i : i;
      if (few > 0 && row < count)
        value = (words)load(v, row * job->of_v.token + c, few, is_bf16);
      if (is_bf16 && few > 0 && row + 1 < count)
        after = (words)load(v, (row + 1) * job->of_v.token + c, few, 1);
      if (is_bf16) value = value >> 16 | after;
      memcpy(to + c / PANEL * PANEL * deep + i * PANEL + c % PANEL, &value, sizeof value);
    }
}

/* Scores of ROWS queries become shares of the softmax so far; earlier results shrink with them. */
INLINE void share(const Attention *job, Block *own, long row, long count, int is_bf16) {
  long width = round_up(job->width, PANEL);
  for (long r = 0; r < ROWS; r++) {
    float *scores = own->scores + r * KEYS, *result = own->results + (row + r) * width;
    floats top = all(-INFINITY), sum = all(0);
    for (long c = 0; c < count; c += LANES) {
      floats score = load_lanes(scores + c, 0);
      if (c + LANES > count) {
        for (long lane = count - c; lane < LANES; lane++) score[lane] = -INFINITY;
        memcpy(scores + c, &score, sizeof score);
      }
      top = larger(score, top);
    }
    float before = own->largest[row + r], most = largest_lane(larger(top, all(before)));
    own->largest[row + r] = most;
    for (long c = 0; c < round_up(count, LANES); c += LANES) {
      floats part = power_of_two((load_lanes(scores + c, 0) - most) * job->scale, is_bf16);
      part = first_lanes(part, count - c);
      sum += part;
      if (is_bf16)
        store_lanes((char *)own->shares + (r * KEYS + c) * 2, part, 1);
      else
        memcpy(scores + c, &part, sizeof part);
    }
    if (most == before) {
      own->sums[row + r] += sum_lanes(sum);
      continue;
    }
    floats shrunk = power_of_two(all((before - most) * job->scale), 0);
    own->sums[row + r] = own->sums[row + r] * shrunk[0] + sum_lanes(sum);
    for (long c = 0; c < width; c += LANES) {
      floats value = load_lanes(result + c, 0) * shrunk;
      memcpy(result + c, &value, sizeof value);
    }
  }
}

/* Adds what a block of keys gives to all queries of the block. */
INLINE void add_keys(const Attention *job, Block *own, long queries, const void *k, const void *v,
                     long count, int is_bf16) {
  long depth = is_bf16 ? job->width / 2 : job->width, width = round_up(job->width, PANEL);
  long step = odd_lines(depth), k_step = is_bf16 ? job->of_k.token / 2 : job->of_k.token;
  long deep = round_up(count, 2) / (is_bf16 ? 2 : 1);
  for (long i = 0; i < round_up(count, PANEL); i += LANES)
    transpose_rows((const uint32_t *)k + i * k_step, k_step, count - i, depth,
                   own->keys + i / PANEL * PANEL * depth + i % PANEL, PANEL);
  pack_values(job, v, count, own->values, is_bf16);
  for (long row = 0; row < queries; row += ROWS) {
    for (long i = 0; i < count; i += PANEL)
      multiply(own->rows + row * step, step, own->keys + i * depth, depth, own->scores + i, KEYS,
               count - i, 0, is_bf16);
    share(job, own, row, count, is_bf16);
    const uint32_t *shares = is_bf16 ? own->shares : (const uint32_t *)own->scores;
    for (long c = 0; c < width; c += PANEL)
      multiply(shares, is_bf16 ? KEYS / 2 : KEYS, own->values + c * deep, deep,
               own->results + row * width + c, width, job->width - c, 1, is_bf16);
  }
}

INLINE void attend(const Attention *job, Block *own, long sample, long head, long first,
                   int is_bf16) {
  long queries = smaller(QUERIES, job->queries - first), width = round_up(job->width, PANEL);
  long depth = is_bf16 ? job->width / 2 : job->width, step = odd_lines(depth);
  const void *q = at(job->q, sample * job->of_q.batch + head * job->of_q.head, is_bf16);
  const void *k = at(job->k, sample * job->of_k.batch + head * job->of_k.head, is_bf16);
  const void *v = at(job->v, sample * job->of_v.batch + head * job->of_v.head, is_bf16);
  long rows = round_up(queries, ROWS);
  memset(own->rows + queries * step, 0, (rows - queries) * step * sizeof(uint32_t));
  memset(own->results, 0, rows * width * sizeof(float));
  for (long r = 0; r < rows; r++) own->largest[r] = -INFINITY, own->sums[r] = 0;
  for (long r = 0; r < queries; r++)
    memcpy(own->rows + r * step, at(q, (first + r) * job->of_q.token, is_bf16),
           depth * sizeof(uint32_t));
  for (long i = 0; i < job->keys; i += KEYS)
    add_keys(job, own, queries, at(k, i * job->of_k.token, is_bf16),
             at(v, i * job->of_v.token, is_bf16), smaller(KEYS, job->keys - i), is_bf16);
  for (long r = 0; r < queries; r++) {
    float one = 1 / own->sums[r];
    long place = ((sample * job->queries + first + r) * job->heads + head) * job->width;
    for (long c = 0; c < job->width; c += LANES)
      store(job->y, place + c, job->width - c, load_lanes(own->results + r * width + c, 0) * one,
            is_bf16);
  }
}

static int attend_all(const Attention *job, long samples, int is_bf16, int threads) {
  long width = round_up(job->width, PANEL), pieces = (job->queries + QUERIES - 1) / QUERIES;
  long sizes[PARTS] = {QUERIES * odd_lines(job->width), KEYS * width, KEYS * width, ROWS * KEYS,
                       ROWS * KEYS, QUERIES, QUERIES * width};
  long total = 0;
  for (int i = 0; i < PARTS; i++) total += round_up(sizes[i], LINE);
  uint32_t *scratch = scratch_of(threads * total);
  if (!scratch) return 1;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    uint32_t *parts[PARTS], *next = scratch + this_thread() * total;
    for (int i = 0; i < PARTS; i++) parts[i] = next, next += round_up(sizes[i], LINE);
    Block own = {parts[0], parts[1], parts[2], parts[3], (float *)parts[4], (float *)parts[5],
                 (float *)parts[6], {0}};
#pragma omp for schedule(static)
    for (long i = 0; i < samples * job->heads * pieces; i++)
      BY_KIND(attend, job, &own, i / pieces / job->heads, i / pieces % job->heads,
              i % pieces * QUERIES);
  }
  free(scratch);
  return 0;
}

/* 0; 1 if there is no memory, 2 if sizes don't suit. `strides` are three each of q, k and v. */
EXPORT int attention(const void *q, const void *k, const void *v, void *y, long samples, long heads,
                     long queries, long keys, long width, const long *strides, double scale,
                     int is_bf16, int threads) {
  if (is_bf16) {
    if (width % 2 || !CAN_MULTIPLY_HALVES) return 2;
    for (int i = 0; i < 9; i++)
      if (strides[i] % 2) return 2;
  }
  Attention job = {q, k, v, y, {strides[0], strides[1], strides[2]},
                   {strides[3], strides[4], strides[5]}, {strides[6], strides[7], strides[8]},
                   heads, queries, keys, width, (float)(scale * 1.4426950408889634)};
  return attend_all(&job, samples, is_bf16, threads);
}
