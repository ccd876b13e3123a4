// Decode attention: one query token per sequence, K and V read where they lie in their pages.
//
// A sequence is cut into fixed splits of tokens whose partial softmaxes are merged afterwards (Flash-Decoding,
// Dao et al. 2023): long sequences use all threads, and a sequence's result depends neither on the batch it is
// in nor on the number of threads.
#include <math.h>

#include <vector>

#include "attention.h"
#include "simd.h"

namespace {

constexpr int64_t kSplit = 256;
constexpr int kBlock = 64;
constexpr int kGroup = 4;  // query heads that share one pass over K and V

struct Item {
  int64_t sequence, head, first, last;
};

int64_t padded_dim(const AttentionCall& c) { return (c.head_dim + kLanes - 1) / kLanes * kLanes; }

// Per query head of an item: maximum, sum, and the weighted V.
int64_t item_floats(const AttentionCall& c) { return (c.q_heads / c.kv_heads) * (2 + padded_dim(c)); }

int64_t splits(int64_t length) { return (length + kSplit - 1) / kSplit; }

// kDim is the head size where it is a common one, so that loops unroll; 0 stands for any other.
template <int kDim>
inline int64_t known(int64_t dim) {
  return kDim ? kDim : dim;
}

template <int kDim, class T>
inline vfloat load_dims(const T* p, int64_t left) {
  return kDim ? load(p) : load_upto(p, (int)left);
}

template <class T, int G, int kDim>
void dot_rows(const T* const* rows, int n, const float* q, int64_t any_dim, int64_t stride,
              float (*scores)[kBlock]) {
  const int64_t dim = known<kDim>(any_dim);
  for (int t = 0; t < n; t++) {
    vfloat acc[G] = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
      vfloat k = load_dims<kDim>(rows[t] + d, dim - d);
      for (int g = 0; g < G; g++) acc[g] += k * load(q + g * stride + d);
    }
    for (int g = 0; g < G; g++) scores[g][t] = sum(acc[g]);
  }
}

template <class T, int G, int V, int kDim>
void add_columns(const T* const* rows, int n, int64_t dim, int64_t stride, const float (*weights)[kBlock],
                 int64_t d, float* out) {
  vfloat acc[G][V];
  for (int g = 0; g < G; g++)
    for (int i = 0; i < V; i++) acc[g][i] = load(out + g * stride + d + i * kLanes);
  for (int t = 0; t < n; t++)
    for (int i = 0; i < V; i++) {
      vfloat v = load_dims<kDim>(rows[t] + d + i * kLanes, dim - d - i * kLanes);
      for (int g = 0; g < G; g++) acc[g][i] += v * splat(weights[g][t]);
    }
  for (int g = 0; g < G; g++)
    for (int i = 0; i < V; i++) store(out + g * stride + d + i * kLanes, acc[g][i]);
}

template <class T, int G, int kDim>
void add_rows(const T* const* rows, int n, int64_t any_dim, int64_t stride, const float (*weights)[kBlock],
              float* out) {
  const int64_t dim = known<kDim>(any_dim);
  int64_t d = 0;
  for (; d + kPanelVectors * kLanes <= dim; d += kPanelVectors * kLanes)
    add_columns<T, G, kPanelVectors, kDim>(rows, n, dim, stride, weights, d, out);
  for (; d < dim; d += kLanes) add_columns<T, G, 1, kDim>(rows, n, dim, stride, weights, d, out);
}

// One block of tokens for G query heads: scores, online softmax, weighted V.
template <class T, int G, int kDim>
void block(const T* const* k_rows, const T* const* v_rows, int n, const float* q, int64_t dim, int64_t stride,
           float* maxima, float* sums, float* out) {
  float scores[G][kBlock];
  dot_rows<T, G, kDim>(k_rows, n, q, dim, stride, scores);
  for (int g = 0; g < G; g++) {
    for (int t = n; t < kBlock; t++) scores[g][t] = -INFINITY;
    vfloat top = splat(maxima[g]);
    for (int t = 0; t < kBlock; t += kLanes) top = maximum(top, load(scores[g] + t));
    float new_max = largest(top);
    vfloat total = {};
    for (int t = 0; t < kBlock; t += kLanes) {
      vfloat s = load(scores[g] + t);
      vfloat p = s > splat(-INFINITY) ? exponential(s - splat(new_max)) : (vfloat){};
      store(scores[g] + t, p);
      total += p;
    }
    float keep = expf(maxima[g] - new_max);
    sums[g] = sums[g] * keep + sum(total);
    maxima[g] = new_max;
    for (int64_t d = 0; d < stride; d += kLanes) store(out + g * stride + d, load(out + g * stride + d) * splat(keep));
  }
  add_rows<T, G, kDim>(v_rows, n, dim, stride, scores, out);
}

template <class T, int kDim>
void run_heads(const AttentionCall& c, const Item& item, float* partial, const float* q) {
  const int64_t group = c.q_heads / c.kv_heads, stride = padded_dim(c);
  const int64_t* table = c.page_table + item.sequence * c.table_width;
  float *maxima = partial, *sums = partial + group, *out = partial + 2 * group;
  const T *k_rows[kBlock], *v_rows[kBlock];
  for (int64_t first = item.first; first < item.last; first += kBlock) {
    const int n = (int)(item.last - first < kBlock ? item.last - first : kBlock);
    for (int t = 0; t < n; t++) {
      k_rows[t] = token_row<T>(c, table, first + t, 0, item.head);
      v_rows[t] = token_row<T>(c, table, first + t, 1, item.head);
    }
    for (int64_t g = 0; g < group; g += kGroup) {
      auto go = [&](auto run) {
        run(k_rows, v_rows, n, q + g * stride, c.head_dim, stride, maxima + g, sums + g, out + g * stride);
      };
      switch (group - g) {
        case 1: go(block<T, 1, kDim>); break;
        case 2: go(block<T, 2, kDim>); break;
        case 3: go(block<T, 3, kDim>); break;
        default: go(block<T, kGroup, kDim>);
      }
    }
  }
}

template <class T, class Q>
void run_item(const AttentionCall& c, const Item& item, float* partial, float* q) {
  const int64_t group = c.q_heads / c.kv_heads, dim = c.head_dim, stride = padded_dim(c);
  for (int64_t g = 0; g < group; g++) {
    const Q* row = (const Q*)c.q + item.sequence * c.q_stride + (item.head * group + g) * dim;
    partial[g] = -INFINITY;
    partial[group + g] = 0;
    for (int64_t d = 0; d < dim; d += kLanes)
      store(q + g * stride + d, load_upto(row + d, (int)(dim - d)) * splat((float)c.scale));
  }
  memset(partial + 2 * group, 0, group * stride * sizeof(float));
  if (dim == 64) return run_heads<T, 64>(c, item, partial, q);
  if (dim == 128) return run_heads<T, 128>(c, item, partial, q);
  run_heads<T, 0>(c, item, partial, q);
}

template <class Q>
void merge(const AttentionCall& c, int64_t sequence, int64_t head, const float* partials, int64_t count) {
  const int64_t group = c.q_heads / c.kv_heads, stride = padded_dim(c), floats = item_floats(c);
  for (int64_t g = 0; g < group; g++) {
    float top = -INFINITY, total = 0;
    for (int64_t s = 0; s < count; s++) top = fmaxf(top, partials[s * floats + g]);
    float weight[count];
    for (int64_t s = 0; s < count; s++) {
      weight[s] = expf(partials[s * floats + g] - top);
      total += weight[s] * partials[s * floats + group + g];
    }
    Q* out = (Q*)c.out + (sequence * c.q_heads + head * group + g) * c.head_dim;
    for (int64_t d = 0; d < c.head_dim; d++) {
      float x = 0;
      for (int64_t s = 0; s < count; s++) x += weight[s] * partials[s * floats + 2 * group + g * stride + d];
      put(out + d, x / total);
    }
  }
}

template <class T, class Q>
void run(const AttentionCall& c) {
  std::vector<Item> items;
  std::vector<int64_t> first_item;
  for (int64_t b = 0; b < c.sequences; b++)
    for (int64_t h = 0; h < c.kv_heads; h++) {
      first_item.push_back((int64_t)items.size());
      for (int64_t t = 0; t < c.seq_lens[b]; t += kSplit)
        items.push_back({b, h, t, t + kSplit < c.seq_lens[b] ? t + kSplit : c.seq_lens[b]});
    }
  const int64_t floats = item_floats(c), count = (int64_t)items.size(), pairs = (int64_t)first_item.size();
#pragma omp parallel num_threads((int)c.threads)
  {
    std::vector<float> q((c.q_heads / c.kv_heads) * padded_dim(c));
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; i++) run_item<T, Q>(c, items[i], c.scratch + i * floats, q.data());
#pragma omp for schedule(static)
    for (int64_t p = 0; p < pairs; p++)
      merge<Q>(c, p / c.kv_heads, p % c.kv_heads, c.scratch + first_item[p] * floats,
               splits(c.seq_lens[p / c.kv_heads]));
  }
}

template <class Q>
void run_for_slab(const AttentionCall& c) {
  if (c.slab_type == kFloat32) return run<float, Q>(c);
  if (c.slab_type == kBFloat16) return run<bfloat16, Q>(c);
  run<float16, Q>(c);
}

}  // namespace

int64_t decode_scratch_floats(const AttentionCall& c) {
  int64_t count = 0;
  for (int64_t b = 0; b < c.sequences; b++) count += splits(c.seq_lens[b]) * c.kv_heads;
  return count * item_floats(c);
}

void decode_attention(const AttentionCall& c) {
  c.q_type == kFloat32 ? run_for_slab<float>(c) : run_for_slab<bfloat16>(c);
}
