/* Numbers of the kernels: float32, or bfloat16 as 16 bits, computed in float32 and rounded once.

   As many at a time as a register of the processor holds, in vectors of GCC's and Clang's C. Wider
   ones would live in memory: GCC has no registers for them. A function takes `is_bf16` as a
   constant and is compiled once for each. NaN stays NaN everywhere, which the search for faults
   relies on; that rules out -ffast-math. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

#ifdef __has_builtin
#if __has_builtin(__builtin_shufflevector)
#define CAN_SHUFFLE
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#define EXPORT __attribute__((visibility("default")))

/* Calls an INLINE function, whose last argument is `is_bf16`, with that as a constant. A parallel
   loop needs it: to GCC, what is outside of the loop is no constant inside, and every load would
   ask for its kind. */
#define BY_KIND(function, ...) (is_bf16 ? function(__VA_ARGS__, 1) : function(__VA_ARGS__, 0))

/* Numbers of a register, and a macro's value for each. */
#ifndef LANES
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#endif
#if LANES == 16
#define EACH_LANE(f, x) EACH_OF_8(f, 0, x), EACH_OF_8(f, 8, x)
#elif LANES == 8
#define EACH_LANE(f, x) EACH_OF_8(f, 0, x)
#else
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

/* The larger (max, >) or the smaller (min, <) of two; b where one of both is NaN. */
#if defined(__AVX512F__)
#define ORDERED(name, sign, a, b) (floats)_mm512_##name##_ps((__m512)a, (__m512)b)
#elif defined(__AVX__)
#define ORDERED(name, sign, a, b) (floats)_mm256_##name##_ps((__m256)a, (__m256)b)
#else
#define ORDERED(name, sign, a, b) either(a sign b, a, b)
#endif

INLINE floats larger(floats a, floats b) { return ORDERED(max, >, a, b); }

INLINE floats lesser(floats a, floats b) { return ORDERED(min, <, a, b); }

INLINE const void *at(const void *x, long i, int is_bf16) {
  return (const char *)x + i * (is_bf16 ? 2 : 4);
}

INLINE void *at_out(void *x, long i, int is_bf16) { return (char *)x + i * (is_bf16 ? 2 : 4); }

/* GCC makes six instructions of `__builtin_convertvector` here, where the processor has one. */
INLINE floats widen(halves x) {
#if defined(__AVX512F__)
  words bits = (words)_mm512_cvtepu16_epi32((__m256i)x);
#elif defined(__AVX2__)
  words bits = (words)_mm256_cvtepu16_epi32((__m128i)x);
#else
  words bits = __builtin_convertvector(x, words);
#endif
  return (floats)(bits << 16);
}

/* To nearest, ties to even; AVX512-BF16 makes zeros of the numbers below 1.2e-38. */
INLINE halves narrow(floats x) {
#ifdef __AVX512BF16__
  return (halves)_mm512_cvtneps_pbh((__m512)x);
#endif
  words bits = (words)x;
  words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  words is_nan = (words)(x != x), made = (is_nan & 0x7fc0u) | (~is_nan & rounded);
#ifdef __AVX512F__
  return (halves)_mm512_cvtepi32_epi16((__m512i)made);
#endif
  return __builtin_convertvector(made, halves);
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

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_MASKS
INLINE __mmask16 first_of(long count) { return (__mmask16)((1u << count) - 1); }
#endif

/* The first `count` numbers from `i` on, at most LANES; zeros beyond. */
INLINE floats load(const void *x, long i, long count, int is_bf16) {
  const void *from = at(x, i, is_bf16);
  if (__builtin_expect(count >= LANES, 1)) return load_lanes(from, is_bf16);
#ifdef HAS_MASKS
  if (is_bf16) return widen((halves)_mm256_maskz_loadu_epi16(first_of(count), from));
  return (floats)_mm512_maskz_loadu_ps(first_of(count), from);
#endif
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
#ifdef HAS_MASKS
  if (is_bf16)
    _mm256_mask_storeu_epi16(to, first_of(count), (__m256i)narrow(values));
  else
    _mm512_mask_storeu_ps(to, first_of(count), (__m512)values);
  return;
#endif
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

/* Lanes i and i ^ width change places. */
#ifdef CAN_SHUFFLE
#define OPPOSITE(i, width) (i) ^ (width)
#define FOLD(x, width) __builtin_shufflevector(x, x, EACH_LANE(OPPOSITE, width))
#else
#define FOLD(x, width) fold_lanes(x, width)
INLINE floats fold_lanes(floats x, int width) {
  float lanes[LANES], other[LANES];
  memcpy(lanes, &x, sizeof lanes);
  for (int i = 0; i < LANES; i++) other[i] = lanes[i ^ width];
  memcpy(&x, other, sizeof x);
  return x;
}
#endif

INLINE float sum_lanes(floats x) {
#if LANES > 8
  x += FOLD(x, 8);
#endif
#if LANES > 4
  x += FOLD(x, 4);
#endif
  x += FOLD(x, 2);
  return x[0] + x[1];
}

INLINE float largest_lane(floats x) {
#if LANES > 8
  x = larger(x, FOLD(x, 8));
#endif
#if LANES > 4
  x = larger(x, FOLD(x, 4));
#endif
  x = larger(x, FOLD(x, 2));
  return x[0] > x[1] ? x[0] : x[1];
}

/* x 2^n, for whole n from -126 to 128; of 128 infinity. */
INLINE floats times_power(floats x, floats n) {
#ifdef __AVX512F__
  return (floats)_mm512_scalef_ps((__m512)x, (__m512)n);
#else
  return x * (floats)((__builtin_convertvector(n, ints) + 127) << 23);
#endif
}

/* To an integer, of numbers below 2^22. */
INLINE floats whole(floats x) { return x + 12582912.0f - 12582912.0f; }

/* 2^x from -126 to 128 within 7.5e-5 of it, for results that become bfloat16. */
INLINE floats two_to(floats x) {
  floats n = whole(x), r = x - n;
  return times_power(((0.0551716642f * r + 0.242611122f) * r + 0.693260986f) * r + 0.999928074f, n);
}

/* 1 / x, or within 6.2e-5 of it if the result becomes bfloat16, without the time of a division. */
INLINE floats reciprocal(floats x, int is_bf16) {
#ifdef __AVX512F__
  if (is_bf16) return (floats)_mm512_rcp14_ps((__m512)x);
#endif
  return 1.0f / x;
}

/* e^x within 2 units in the last place, or 8e-5 of it if the result becomes bfloat16: infinity from
   88.37 on, 1.2e-38 below -87.33. */
INLINE floats exponential(floats x, int is_bf16) {
  x = lesser(all(89.0f), larger(all(-87.33f), x));
  if (is_bf16) return two_to(x * 1.44269504f);
  floats n = whole(x * 1.44269504f);
  floats r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  floats p = 1.9875691500e-4f * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return times_power(p, n);
}

/* 2^x of numbers up to 0, 1e-38 below -126: within a unit in the last place, or 7.5e-5 of it if the
   result becomes bfloat16. */
INLINE floats power_of_two(floats x, int is_bf16) {
  x = larger(all(-126.0f), x);
  if (is_bf16) return two_to(x);
  floats n = whole(x), r = x - n;
  floats p = 1.32764714e-3f * r + 9.67554133e-3f;
  p = p * r + 5.55071328e-2f;
  p = p * r + 2.40221197e-1f;
  p = p * r + 6.93146967e-1f;
  return times_power(p * r + 1.00000007f, n);
}

INLINE floats silu(floats x, int is_bf16) {
  return x * reciprocal(1.0f + exponential(-x, is_bf16), is_bf16);
}

INLINE floats magnitude(floats x) { return (floats)((ints)x & 0x7fffffff); }

/* x Phi(x) of Phi(-|x|): max(x, 0) - |x| Phi(-|x|), for x of either sign. */
INLINE floats gelu_of(floats x, floats tail) { return larger(all(0), x) - magnitude(x) * tail; }

/* x Phi(x), with the complementary error function of Abramowitz and Stegun 7.1.26: within 1.5e-7,
   and 2e-4 of it if the result becomes bfloat16. */
INLINE floats gelu(floats x, int is_bf16) {
  floats z = magnitude(x) * 0.70710678f;
  floats t = reciprocal(1.0f + 0.3275911f * z, is_bf16);
  floats p = 1.061405429f * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  return gelu_of(x, 0.5f * p * t * exponential(-z * z, is_bf16));
}

/* The same by Abramowitz and Stegun 7.1.28, within 7e-7 and in half the time: no exponential. */
INLINE floats gelu_by_power(floats x, int is_bf16) {
  floats z = magnitude(x) * 0.70710678f;
  floats p = 4.30638e-5f * z + 2.765672e-4f;
  p = p * z + 1.520143e-4f;
  p = p * z + 9.2705272e-3f;
  p = p * z + 4.22820123e-2f;
  p = p * z + 7.05230784e-2f;
  p = p * z + 1.0f;
  p *= p;
  p *= p;
  p *= p;
  return gelu_of(x, 0.5f * reciprocal(p * p, is_bf16));
}

INLINE floats gelu_tanh(floats x, int is_bf16) {
  floats power = exponential(-1.59576912f * (x + 0.044715f * x * x * x), is_bf16);
  return x * reciprocal(1.0f + power, is_bf16);
}
