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
  vuint w = (vuint)v;
  vhalf h = __builtin_convertvector((w + 0x7fffu + ((w >> 16) & 1u)) >> 16, vhalf);
  memcpy(p, &h, n * sizeof(bfloat16));
}

inline int lanes_left(int64_t left) { return left < kLanes ? (int)left : kLanes; }

template <class T, class Out>
void scale_row(const T* x, vfloat squares, const float* weight, Out* out, int64_t columns, float eps) {
  const vfloat scale = splat(1.0f / sqrtf(sum(squares) / (float)columns + eps));
  for (int64_t i = 0; i < columns; i += kLanes) {
    const int left = (int)(columns - i);
    write(out + i, load_upto(x + i, left) * scale * load_upto(weight + i, left), lanes_left(left));
  }
}

template <class T>
void rms_norm_row(const T* x, const float* weight, T* out, int64_t columns, float eps) {
  vfloat squares = {};
  for (int64_t i = 0; i < columns; i += kLanes) {
    vfloat v = load_upto(x + i, (int)(columns - i));
    squares += v * v;
  }
  scale_row(x, squares, weight, out, columns, eps);
}

template <class T>
void add_rms_norm_row(float* residual, const T* delta, const float* weight, T* out, int64_t columns, float eps) {
  vfloat squares = {};
  for (int64_t i = 0; i < columns; i += kLanes) {
    const int left = (int)(columns - i);
    vfloat v = load_upto(residual + i, left) + load_upto(delta + i, left);
    write(residual + i, v, lanes_left(left));
    squares += v * v;
  }
  scale_row(residual, squares, weight, out, columns, eps);
}

template <class T>
void silu_and_multiply_row(const T* gate, const T* up, T* out, int64_t columns) {
  for (int64_t i = 0; i < columns; i += kLanes) {
    const int left = (int)(columns - i);
    vfloat g = load_upto(gate + i, left), u = load_upto(up + i, left);
    // 1 / (1 + e^-g) without overflow: e of a negative number only.
    vfloat e = exponential(g < splat(0.0f) ? g : -g);
    vfloat sigmoid = (g < splat(0.0f) ? e : splat(1.0f)) / (splat(1.0f) + e);
    write(out + i, g * sigmoid * u, lanes_left(left));
  }
}

template <class T>
void rotate_head(const T* x, const float* cos, const float* sin, T* out, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int left = (int)(half - i);
    vfloat a = load_upto(x + i, left), b = load_upto(x + half + i, left);
    vfloat first = a * load_upto(cos + i, left) + b * load_upto(sin + i, left);
    vfloat second = b * load_upto(cos + half + i, left) + a * load_upto(sin + half + i, left);
    write(out + i, first, lanes_left(left));
    write(out + half + i, second, lanes_left(left));
  }
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
