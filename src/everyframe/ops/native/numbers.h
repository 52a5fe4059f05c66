/* Numbers of the kernels: float32, or bfloat16 as 16 bits, computed in float32 and rounded once.

   As many at a time as a register of the processor holds, in vectors of GCC's and Clang's C. Wider
   ones would live in memory: GCC has no registers for them. A function takes `is_bf16` as a constant and is compiled once for each. NaN stays NaN
   everywhere, which the search for faults relies on; that rules out -ffast-math. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define CAN_SHUFFLE
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* Numbers of a register, and a macro's value for each. */
#if defined(__AVX512F__)
#define LANES 16
#define EACH_LANE(f, x) EACH_OF_8(f, 0, x), EACH_OF_8(f, 8, x)
#elif defined(__AVX__)
#define LANES 8
#define EACH_LANE(f, x) EACH_OF_8(f, 0, x)
#else
#define LANES 4
#define EACH_LANE(f, x) EACH_OF_4(f, 0, x)
#endif
#define EACH_OF_4(f, i, x) f((i), x), f((i) + 1, x), f((i) + 2, x), f((i) + 3, x)
#define EACH_OF_8(f, i, x) EACH_OF_4(f, i, x), EACH_OF_4(f, (i) + 4, x)

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

INLINE long smaller(long a, long b) { return a < b ? a : b; }

INLINE floats all(float x) { return x - (floats){0}; }

INLINE floats either(ints mask, floats yes, floats no) {
  return (floats)((mask & (ints)yes) | (~mask & (ints)no));
}

INLINE floats larger(floats a, floats b) { return either(a > b, a, b); }

INLINE const void *at(const void *x, long i, int is_bf16) {
  return (const char *)x + i * (is_bf16 ? 2 : 4);
}

INLINE void *at_out(void *x, long i, int is_bf16) { return (char *)x + i * (is_bf16 ? 2 : 4); }

INLINE floats widen(halves x) {
  return (floats)(__builtin_convertvector(x, words) << 16);
}

/* To nearest, ties to even; AVX512-BF16 makes zeros of the numbers below 1.2e-38. */
INLINE halves narrow(floats x) {
#ifdef __AVX512BF16__
  return (halves)_mm512_cvtneps_pbh((__m512)x);
#endif
  words bits = (words)x;
  words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  words is_nan = (words)(x != x);
  return __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), halves);
}

INLINE floats load_lanes(const void *x, int is_bf16) {
  if (is_bf16) {
    halves bits;
    memcpy(&bits, x, sizeof bits);
    return widen(bits);
  }
  floats values;
  memcpy(&values, x, sizeof values);
  return values;
}

INLINE void store_lanes(void *y, floats values, int is_bf16) {
  if (is_bf16) {
    halves bits = narrow(values);
    memcpy(y, &bits, sizeof bits);
  } else {
    memcpy(y, &values, sizeof values);
  }
}

/* The first `count` numbers from `i` on, at most LANES; zeros beyond. */
INLINE floats load(const void *x, long i, long count, int is_bf16) {
  const void *from = at(x, i, is_bf16);
  if (__builtin_expect(count >= LANES, 1)) return load_lanes(from, is_bf16);
  float buffer[LANES] = {0};
  memcpy(buffer, from, count * (is_bf16 ? 2 : 4));
  return load_lanes(buffer, is_bf16);
}

INLINE void store(void *y, long i, long count, floats values, int is_bf16) {
  void *to = at_out(y, i, is_bf16);
  if (__builtin_expect(count >= LANES, 1)) {
    store_lanes(to, values, is_bf16);
    return;
  }
  float buffer[LANES];
  store_lanes(buffer, values, is_bf16);
  memcpy(to, buffer, count * (is_bf16 ? 2 : 4));
}

INLINE float get(const void *x, long i, int is_bf16) {
  if (!is_bf16) return ((const float *)x)[i];
  uint32_t bits = (uint32_t)((const uint16_t *)x)[i] << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

/* Lanes from `count` on are zero. */
INLINE floats first_lanes(floats x, long count) {
#define NUMBER(i, x) (i)
  const ints lane = {EACH_LANE(NUMBER, 0)};
#undef NUMBER
  return (floats)((ints)x & (lane < (int32_t)smaller(count, LANES)));
}

INLINE float sum_lanes(floats x) {
#ifdef CAN_SHUFFLE
#define OPPOSITE(i, width) (i) ^ (width)
#if LANES > 8
  x += __builtin_shufflevector(x, x, EACH_LANE(OPPOSITE, 8));
#endif
#if LANES > 4
  x += __builtin_shufflevector(x, x, EACH_LANE(OPPOSITE, 4));
#endif
  x += __builtin_shufflevector(x, x, EACH_LANE(OPPOSITE, 2));
#undef OPPOSITE
  return x[0] + x[1];
#else
  float lanes[LANES];
  memcpy(lanes, &x, sizeof lanes);
  for (int width = LANES / 2; width; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
#endif
}

/* e^x within 2 units in the last place: infinity from 88.37 on, 1.2e-38 below -87.33. */
INLINE floats exponential(floats x) {
  ints is_beyond = x > 88.37f;
  x = either(x < -87.33f, all(-87.33f), x);
  const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
  floats n = x * 1.44269504f + magic;
  ints power = (ints)n - 0x4b400000 + 127;
  n -= magic;
  floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return either(is_beyond, all(INFINITY), p * (floats)(power << 23));
}

INLINE floats silu(floats x) { return x / (1.0f + exponential(-x)); }

/* x Phi(x), with the complementary error function of Abramowitz and Stegun 7.1.26: within 1.5e-7. */
INLINE floats gelu(floats x) {
  floats z = (floats)((ints)x & 0x7fffffff) * 0.70710678f;
  floats t = 1.0f / (1.0f + 0.3275911f * z);
  floats p = 1.061405429f * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  floats tail = 0.5f * p * t * exponential(-z * z);
  return x * either(x < 0.0f, tail, 1.0f - tail);
}

/* The same by Abramowitz and Stegun 7.1.28, within 7e-7 and in half the time: no exponential. */
INLINE floats gelu_by_power(floats x) {
  floats z = (floats)((ints)x & 0x7fffffff) * 0.70710678f;
  floats p = 4.30638e-5f * z + 2.765672e-4f;
  p = p * z + 1.520143e-4f;
  p = p * z + 9.2705272e-3f;
  p = p * z + 4.22820123e-2f;
  p = p * z + 7.05230784e-2f;
  p = p * z + 1.0f;
  p *= p;
  p *= p;
  p *= p;
  floats tail = 0.5f / (p * p);
  return x * either(x < 0.0f, tail, 1.0f - tail);
}

INLINE floats gelu_tanh(floats x) {
  return x / (1.0f + exponential(-1.59576912f * (x + 0.044715f * x * x * x)));
}
