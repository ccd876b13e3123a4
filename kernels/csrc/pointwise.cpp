// What surrounds the matrix products of a layer, each in one pass: computed in float32, rounded once.
#include <math.h>

#include "attention.h"
#include "simd.h"

namespace {

// Below this, waking the other threads costs more than it saves.
constexpr int64_t kElementsPerThread = 32768;

int threads_for(int64_t elements, int64_t threads) {
  const int64_t useful = elements / kElementsPerThread + 1;
  return (int)(useful < threads ? useful : threads);
}

inline void write(float* p, vfloat v, int n) { memcpy(p, &v, n * sizeof(float)); }

inline void write(bfloat16* p, vfloat v, int n) {
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh((__m512)v);
#else
  vuint w = (vuint)v;
  vhalf h = __builtin_convertvector((w + 0x7fffu + ((w >> 16) & 1u)) >> 16, vhalf);
#endif
  memcpy(p, &h, n * sizeof(bfloat16));
}

// body(first, how many of kLanes) over a row. Whole vectors apart from the rest: their copies become moves.
template <class Body>
inline void for_vectors(int64_t columns, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= columns; i += kLanes) body(i, kLanes);
  if (i < columns) body(i, (int)(columns - i));
}

template <class T, class Out>
void scale_row(const T* x, vfloat squares, const float* weight, Out* out, int64_t columns, float eps) {
  const vfloat scale = splat(1.0f / sqrtf(sum(squares) / (float)columns + eps));
  for_vectors(columns, [&](int64_t i, int n) {
    write(out + i, load_upto(x + i, n) * scale * load_upto(weight + i, n), n);
  });
}

template <class T>
void rms_norm_row(const T* x, const float* weight, T* out, int64_t columns, float eps) {
  vfloat squares = {};
  for_vectors(columns, [&](int64_t i, int n) {
    const vfloat v = load_upto(x + i, n);
    squares += v * v;
  });
  scale_row(x, squares, weight, out, columns, eps);
}

template <class T>
void add_rms_norm_row(float* residual, const T* delta, const float* weight, T* out, int64_t columns, float eps) {
  vfloat squares = {};
  for_vectors(columns, [&](int64_t i, int n) {
    const vfloat v = load_upto(residual + i, n) + load_upto(delta + i, n);
    write(residual + i, v, n);
    squares += v * v;
  });
  scale_row(residual, squares, weight, out, columns, eps);
}

template <class T>
void silu_and_multiply_row(const T* gate, const T* up, T* out, int64_t columns) {
  for_vectors(columns, [&](int64_t i, int n) {
    const vfloat g = load_upto(gate + i, n);
    write(out + i, g * load_upto(up + i, n) / (splat(1.0f) + exponential(-g)), n);
  });
}

template <class T>
void rotate_head(const T* x, const float* cos, const float* sin, T* out, int64_t half) {
  for_vectors(half, [&](int64_t i, int n) {
    const vfloat a = load_upto(x + i, n), b = load_upto(x + half + i, n);
    write(out + i, a * load_upto(cos + i, n) + b * load_upto(sin + i, n), n);
    write(out + half + i, b * load_upto(cos + half + i, n) + a * load_upto(sin + half + i, n), n);
  });
}

template <class T>
void rms_norm(const T* x, const float* weight, T* out, int64_t rows, int64_t columns, float eps, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(rows * columns, threads))
  for (int64_t r = 0; r < rows; r++) rms_norm_row(x + r * columns, weight, out + r * columns, columns, eps);
}

template <class T>
void add_rms_norm(float* residual, const T* delta, const float* weight, T* out, int64_t rows, int64_t columns,
                  float eps, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(rows * columns, threads))
  for (int64_t r = 0; r < rows; r++) {
    const int64_t at = r * columns;
    add_rms_norm_row(residual + at, delta + at, weight, out + at, columns, eps);
  }
}

template <class T>
void silu_and_multiply(const T* gate_up, T* out, int64_t rows, int64_t columns, int64_t threads) {
#pragma omp parallel for num_threads(threads_for(rows * columns, threads))
  for (int64_t r = 0; r < rows; r++) {
    const T* gate = gate_up + r * 2 * columns;
    silu_and_multiply_row(gate, gate + columns, out + r * columns, columns);
  }
}

template <class T>
void rotate(const T* x, const float* cos, const float* sin, T* out, int64_t rows, int64_t stride, int64_t heads, int64_t dim,
            int64_t threads) {
#pragma omp parallel for num_threads(threads_for(rows * heads * dim, threads))
  for (int64_t r = 0; r < rows; r++)
    for (int64_t h = 0; h < heads; h++)
      rotate_head(x + r * stride + h * dim, cos + r * dim, sin + r * dim, out + (r * heads + h) * dim, dim / 2);
}

}  // namespace

extern "C" {

// `type` is kFloat32 or kBFloat16, of all tensors but norm weights, the residual, cos and sin, which are float32.
void diptych_rms_norm(const void* x, const float* weight, void* out, int64_t rows, int64_t columns, double eps,
                      int64_t type, int64_t threads) {
  if (type == kFloat32)
    rms_norm((const float*)x, weight, (float*)out, rows, columns, (float)eps, threads);
  else
    rms_norm((const bfloat16*)x, weight, (bfloat16*)out, rows, columns, (float)eps, threads);
}

void diptych_add_rms_norm(float* residual, const void* delta, const float* weight, void* out, int64_t rows,
                          int64_t columns, double eps, int64_t type, int64_t threads) {
  if (type == kFloat32)
    add_rms_norm(residual, (const float*)delta, weight, (float*)out, rows, columns, (float)eps, threads);
  else
    add_rms_norm(residual, (const bfloat16*)delta, weight, (bfloat16*)out, rows, columns, (float)eps, threads);
}

void diptych_silu_and_multiply(const void* gate_up, void* out, int64_t rows, int64_t columns, int64_t type,
                               int64_t threads) {
  if (type == kFloat32)
    silu_and_multiply((const float*)gate_up, (float*)out, rows, columns, threads);
  else
    silu_and_multiply((const bfloat16*)gate_up, (bfloat16*)out, rows, columns, threads);
}

void diptych_rotate(const void* x, const float* cos, const float* sin, void* out, int64_t rows, int64_t stride,
                    int64_t heads, int64_t dim, int64_t type, int64_t threads) {
  if (type == kFloat32)
    rotate((const float*)x, cos, sin, (float*)out, rows, stride, heads, dim, threads);
  else
    rotate((const bfloat16*)x, cos, sin, (bfloat16*)out, rows, stride, heads, dim, threads);
}
}
