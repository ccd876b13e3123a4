// Vectors of floats through the compiler's vector extensions: the same source for AVX-512, AVX2, SSE and NEON.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kPanelVectors = 4;  // 6 rows x 4 vectors of accumulators fill 24 of 32 registers
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kPanelVectors = 2;  // 12 of 16
#else
constexpr int kVectorBytes = 16;
constexpr int kPanelVectors = 2;
#endif

constexpr int kLanes = kVectorBytes / 4;

typedef float vfloat __attribute__((vector_size(kVectorBytes)));
typedef int32_t vint __attribute__((vector_size(kVectorBytes)));
typedef uint32_t vuint __attribute__((vector_size(kVectorBytes)));
typedef uint16_t vhalf __attribute__((vector_size(kVectorBytes / 2)));

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

static inline vfloat splat(float x) { return x - (vfloat){}; }

static inline vfloat load(const float* p) {
  vfloat v;
  memcpy(&v, p, sizeof v);
  return v;
}

static inline vfloat load(const bfloat16* p) {
  vhalf h;
  memcpy(&h, p, sizeof h);
  return (vfloat)(__builtin_convertvector(h, vuint) << 16);
}

// Exponent re-biased by a multiplication, which makes subnormals right too; infinities do not occur in KV.
static inline vfloat load(const float16* p) {
  vhalf h;
  memcpy(&h, p, sizeof h);
  vuint w = __builtin_convertvector(h, vuint);
  vfloat magnitude = (vfloat)((w & 0x7fffu) << 13) * splat(0x1p112f);
  return (vfloat)((vuint)magnitude | ((w & 0x8000u) << 16));
}

// The first n lanes; the others are zero.
template <class T>
static inline vfloat load_first(const T* p, int n) {
  T buffer[kLanes] = {};
  memcpy(buffer, p, n * sizeof(T));
  return load(buffer);
}

template <class T>
static inline vfloat load_upto(const T* p, int n) {
  return n >= kLanes ? load(p) : load_first(p, n);
}

static inline void store(float* p, vfloat v) { memcpy(p, &v, sizeof v); }

static inline void put(float* p, float x) { *p = x; }

// Round to nearest, ties to even.
static inline void put(bfloat16* p, float x) {
  uint32_t w;
  memcpy(&w, &x, sizeof w);
  p->bits = (uint16_t)((w + 0x7fffu + ((w >> 16) & 1u)) >> 16);
}

static inline vfloat maximum(vfloat a, vfloat b) { return a > b ? a : b; }
static inline vfloat minimum(vfloat a, vfloat b) { return a < b ? a : b; }

// Across the lanes of one vector, by halves: the vector shrinks with each step.
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
#define DIPTYCH_HALVES 1
#endif
#endif

#if DIPTYCH_HALVES
typedef float float4 __attribute__((vector_size(16)));

template <class Combine>
static inline float across4(float4 v, Combine combine) {
  v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  v = combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
  return v[0];
}

template <class Combine>
static inline float across(vfloat v, Combine combine) {
#if defined(__AVX512F__)
  auto eight = combine(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                       __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  return across4(combine(__builtin_shufflevector(eight, eight, 0, 1, 2, 3),
                         __builtin_shufflevector(eight, eight, 4, 5, 6, 7)),
                 combine);
#elif defined(__AVX2__)
  return across4(combine(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7)),
                 combine);
#else
  return across4(v, combine);
#endif
}
#else
template <class Combine>
static inline float across(vfloat v, Combine combine) {
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = combine(lanes[i], lanes[i + width]);
  return lanes[0];
}
#endif

static inline float sum(vfloat v) {
  return across(v, [](auto a, auto b) { return a + b; });
}

static inline float largest(vfloat v) {
  return across(v, [](auto a, auto b) { return a > b ? a : b; });
}

// e^x, relative error about 1e-7; x beyond -87 or 87 counts as that.
static inline vfloat exponential(vfloat x) {
  x = minimum(maximum(x, splat(-87.0f)), splat(87.0f));
#if defined(__AVX512F__)
  const vfloat n = (vfloat)_mm512_roundscale_ps((__m512)(x * splat(1.44269504f)), 0);
#else
  const vfloat shifted = x * splat(1.44269504f) + splat(12582912.0f);  // 1.5 * 2^23: rounds to an integer
  const vfloat n = shifted - splat(12582912.0f);
#endif
  vfloat r = x - n * splat(0.693359375f) + n * splat(2.12194440e-4f);  // ln 2 in two parts
  vfloat p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * r * r + r + splat(1.0f);
#if defined(__AVX512F__)
  return (vfloat)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  vint bits = (__builtin_convertvector(n, vint) + 127) << 23;
  return p * (vfloat)bits;
#endif
}
