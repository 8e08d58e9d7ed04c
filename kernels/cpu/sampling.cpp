// Sampling a token from each row of logits, and log-probabilities, for CPUs: the C interface, the division of work
// between threads, and everything except passes over a whole row. kernels/sampling.py states the contracts. Independent
// of torch.
//
// A first pass finds the maximum of each GROUP of columns. That decides greedy rows; for other rows it tells which
// groups a filter can skip. Filters are thresholds on the logit, so equal logits are kept or removed together, and
// nothing sorts the vocabulary:
// - top_k: the k-th largest maximum is at most the k-th largest logit, so few candidates remain to select from.
// - top_p: a row of bfloat16 numbers has few distinct values, which are counted. In other rows, logits that are too
//   small for any nucleus are skipped, and a histogram of the rest finds the few logits among which the nucleus ends.
//   If top_p is the only filter, only the weights from there on are summed.
// One thread samples a row, in the order of ids, from sums over fixed groups, so threads do not change a result.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "parallel.h"
#include "scan.h"
#include "variants.h"

#define EXPORT __attribute__((visibility("default")))

namespace {

constexpr int CHUNK = 32;             // groups that a thread claims at once
constexpr int64_t WORTH_THREADS = 1 << 15;  // logits
constexpr int BINS = 2048;
constexpr int SORTED_AT_ONCE = 512;
constexpr double LOG2_E = 1.4426950408889634;
constexpr int HALVES = 1 << 16;  // bit patterns of bfloat16 numbers
constexpr uint16_t MINUS_INFINITY = 0xFF80;  // as bfloat16

const Scan* const VARIANTS[] = {IF_BASELINE(scan_baseline), IF_AVX2(scan_avx2), IF_AVX512(scan_avx512),
                                IF_AVX512_BF16(scan_avx512_bf16), IF_AMX(scan_avx512_bf16)};  // without matrix units

struct Matrix {
  const char* data;
  int64_t row_bytes;
  int rows, columns;
  bool bf16;

  Row row(int index) const { return {data + index * row_bytes, columns, bf16}; }
};

// `Draw` in kernels/sampling.py.
struct Draw {
  double temperature, top_k, top_p, min_p, noise;
};

// A row and what the first pass found in its groups.
struct Summary {
  const Scan& scan;
  Row row;
  const float* maxima;
  const double* sums;  // sums of weights from `floor` up, if requested
  float highest;       // NaN if any is
  float floor = NO_FLOOR;

  int groups() const { return groups_of(row.columns); }
  float at(int column) const {
    if (!row.bf16) return ((const float*)row.logits)[column];
    const uint32_t bits = (uint32_t)((const uint16_t*)row.logits)[column] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
  }
};

// Memory of one thread, kept for the next call.
struct Workspace {
  std::vector<int32_t> ids, bins;
  std::vector<float> values, weights, selected, selected_weights;
  std::vector<double> sums;
  std::vector<int32_t> counts = std::vector<int32_t>(HALVES);  // all 0 between calls

  void resize(int columns) {
    if (ids.size() >= (size_t)columns + 16) return;
    for (std::vector<int32_t>* numbers : {&ids, &bins}) numbers->resize(columns + 16);
    for (std::vector<float>* numbers : {&values, &weights, &selected, &selected_weights}) numbers->resize(columns + 16);
    sums.resize(groups_of(columns));
  }
};
thread_local Workspace workspace;

// Summarises all rows, then calls finish(row, summary) for each. scale_of(row): of the weights to sum, or 0 for none.
// floor_of(row, summary without sums): the lowest logit whose weight counts, or NO_FLOOR.
template <class ScaleOf, class FloorOf, class Finish>
void each_row(const Matrix& matrix, const Scan& scan, int threads, bool weighted, ScaleOf scale_of, FloorOf floor_of,
              Finish finish) {
  const int groups = groups_of(matrix.columns), chunks = (groups + CHUNK - 1) / CHUNK;
  std::vector<float> maxima((size_t)matrix.rows * groups), highest(matrix.rows), floors(matrix.rows, NO_FLOOR);
  std::vector<double> sums(weighted ? maxima.size() : 0);
  const auto summary = [&](int row) {
    const size_t first = (size_t)row * groups;
    return Summary{scan, matrix.row(row), &maxima[first], weighted ? &sums[first] : nullptr, highest[row], floors[row]};
  };
  if ((int64_t)matrix.rows * matrix.columns <= WORTH_THREADS) threads = 1;
  const auto each = [threads](int64_t tasks, auto work) {
    parallel(tasks, 1, threads, [&](int64_t begin, int64_t end) {
      for (int64_t task = begin; task < end; task++) work((int)task);
    });
  };
  each((int64_t)matrix.rows * chunks, [&](int task) {
    const int row = task / chunks, first = task % chunks * CHUNK;
    scan.maxima(matrix.row(row), first, std::min(first + CHUNK, groups), &maxima[(size_t)row * groups]);
  });
  for (int row = 0; row < matrix.rows; row++) {
    float most = -INFINITY;
    for (int group = 0; group < groups && most == most; group++) {
      const float next = maxima[(size_t)row * groups + group];
      if (!(next <= most)) most = next;
    }
    highest[row] = most;
  }
  if (weighted) {
    each(matrix.rows, [&](int row) {
      if (std::isfinite(highest[row])) floors[row] = floor_of(row, summary(row));
    });
    each((int64_t)matrix.rows * chunks, [&](int task) {
      const int row = task / chunks, first = task % chunks * CHUNK;
      const float scale = scale_of(row);
      if (scale > 0.0f && std::isfinite(highest[row]))
        scan.sums(matrix.row(row), first, std::min(first + CHUNK, groups), {highest[row], scale, floors[row]},
                  &maxima[(size_t)row * groups], &sums[(size_t)row * groups]);
    });
  }
  each(matrix.rows, [&](int row) { finish(row, summary(row)); });
}

float without_floor(int, const Summary&) { return NO_FLOOR; }

// The first column that holds `highest`, or the first NaN.
int likeliest(const Summary& s) {
  const bool nan = s.highest != s.highest;
  const auto found = [&](float x) { return nan ? x != x : x == s.highest; };
  int group = 0;
  while (!found(s.maxima[group])) group++;
  int column = group * GROUP;
  while (!found(s.at(column))) column++;
  return column;
}

// k: 1 .. columns.
float kth_largest(const Summary& s, int k) {
  Workspace& space = workspace;
  std::vector<float>& values = space.values;
  float bound = -INFINITY;
  if (k <= s.groups()) {
    std::copy(s.maxima, s.maxima + s.groups(), values.begin());
    std::nth_element(values.begin(), values.begin() + k - 1, values.begin() + s.groups(), std::greater<float>());
    bound = values[k - 1];
  }
  const int count = s.scan.gather(s.row, s.maxima, bound, space.ids.data(), values.data());
  std::nth_element(values.begin(), values.begin() + k - 1, values.begin() + count, std::greater<float>());
  return values[k - 1];
}

double sum_of(const double* sums, int groups) {
  double total = 0.0;
  for (int group = 0; group < groups; group++) total += sums[group];
  return total;
}

// The largest value such that its weight and those of all larger values sum to at least `wanted`. All values lie
// between low and high, and weights increase with them.
float nucleus_floor(const Scan& scan, const float* values, const float* weights, int count, float low, float high,
                    double wanted) {
  Workspace& space = workspace;
  int32_t* bins = space.bins.data();
  double above = 0.0;
  while (count > SORTED_AT_ONCE && low < high) {
    const float per_value = (float)std::min((double)FLT_MAX, BINS / ((double)high - low));
    scan.spread(values, count, high, per_value, BINS, bins);
    double masses[BINS] = {};
    int last = 0;  // bin of the lowest value
    for (int i = 0; i < count; i++) {
      masses[bins[i]] += weights[i];
      last = std::max(last, bins[i]);
    }
    int bin = 0;
    while (bin < last && above + masses[bin] < wanted) above += masses[bin++];
    int kept = 0;
    for (int i = 0; i < count; i++) {
      if (bins[i] != bin) continue;
      space.selected[kept] = values[i];
      space.selected_weights[kept++] = weights[i];
    }
    values = space.selected.data(), weights = space.selected_weights.data();
    const auto [lowest, highest] = std::minmax_element(values, values + kept);
    if (kept == count && *lowest == low && *highest == high) break;  // too close to each other for float32
    low = *lowest, high = *highest, count = kept;
  }
  if (low == high) return low;
  std::vector<int32_t> order(count);
  for (int i = 0; i < count; i++) order[i] = i;
  std::sort(order.begin(), order.end(), [&](int a, int b) { return values[a] > values[b]; });
  int place = 0;
  while (place < count - 1 && (above += weights[order[place]]) < wanted) place++;
  return values[order[place]];
}

// The first group whose sum, with those before it, exceeds noise * total. target becomes the rest that the group itself
// has to exceed.
int draw_group(const double* sums, int groups, double noise, double& target) {
  const double total = sum_of(sums, groups);
  target = std::min(noise * total, std::nextafter(total, 0.0));
  double before = 0.0;
  int group = 0;
  while (before + sums[group] <= target) before += sums[group++];
  target -= before;
  return group;
}

// The first position whose weight, with those before it, exceeds the target; the last position with a weight if
// rounding leaves none. Never a position of weight 0.
int draw_place(const float* weights, int count, double target) {
  double sum = 0.0;
  int last = 0;
  for (int place = 0; place < count; place++) {
    if (weights[place] == 0.0f) continue;
    sum += weights[place];
    last = place;
    if (sum > target) break;
  }
  return last;
}

float scale_of(double temperature) { return (float)(LOG2_E / temperature); }

// Samples from the whole row, or from its nucleus.
int draw_from_row(const Summary& s, const Draw& draw) {
  double target;
  const int group = draw_group(s.sums, s.groups(), draw.noise, target);
  const int first = group * GROUP, count = std::min(GROUP, s.row.columns - first);
  float values[GROUP], weights[GROUP];
  double sum;
  for (int i = 0; i < count; i++) values[i] = s.at(first + i);
  s.scan.weigh(values, count, {s.highest, scale_of(draw.temperature), s.floor}, weights, &sum);
  return first + draw_place(weights, count, target);
}

bool is_filtered(const Draw& draw, int columns) {
  return (draw.top_k > 0.0 && draw.top_k < columns) || draw.min_p > 0.0;
}

// nucleus_floor for a whole row of bfloat16 numbers: equal numbers are counted and weighed together. Groups of -inf
// alone, which may be most of a row under a mask, are not counted one by one: a processor waits for a count to be
// stored before it adds to the same one again.
float nucleus_floor_of_counts(const Summary& s, Weighing by, double top_p) {
  Workspace& space = workspace;
  const uint16_t* row = (const uint16_t*)s.row.logits;
  int banned = 0;
  for (int group = 0; group < s.groups(); group++) {
    const int first = group * GROUP, end = std::min(first + GROUP, s.row.columns);
    if (s.maxima[group] == -INFINITY) banned += end - first;
    else
      for (int column = first; column < end; column++) space.counts[row[column]]++;
  }
  uint32_t highest, half;
  memcpy(&highest, &s.highest, 4);
  half = s.highest == 0.0f ? 0 : highest >> 16;  // not that of -0: the loop passes both zeros
  int distinct = 0;
  // -inf weighs nothing, and is far below the other numbers
  int seen = banned + std::exchange(space.counts[MINUS_INFINITY], 0);
  while (seen < s.row.columns) {
    const int count = std::exchange(space.counts[half], 0);
    if (count > 0) {
      const uint32_t bits = half << 16;
      memcpy(&space.values[distinct], &bits, 4);
      space.bins[distinct++] = count;
      seen += count;
    }
    half = half == 0 ? HALVES / 2 : half < HALVES / 2 ? half - 1 : half + 1;  // negative: lower with larger bits
  }
  s.scan.weigh(space.values.data(), distinct, by, space.weights.data(), space.sums.data());
  const auto mass = [&](int place) { return (double)space.bins[place] * space.weights[place]; };
  double total = 0.0, above = 0.0;
  for (int place = 0; place < distinct; place++) total += mass(place);
  int place = 0;
  while (place < distinct - 1 && (above += mass(place)) < top_p * total) place++;
  return space.values[place];
}

// Where the nucleus ends if top_p is the only filter.
float floor_of_row(const Summary& s, const Draw& draw) {
  Workspace& space = workspace;
  space.resize(s.row.columns);
  const Weighing by{s.highest, scale_of(draw.temperature), NO_FLOOR};
  if (s.row.bf16) return nucleus_floor_of_counts(s, by, draw.top_p);
  s.scan.sums(s.row, 0, s.groups(), by, s.maxima, space.sums.data());
  const double total = sum_of(space.sums.data(), s.groups());
  // All weights below this one together are less than the share 1 - top_p. It is lowered by the possible rounding
  // error.
  const double bound = 0.99 * (1.0 - draw.top_p) * total / s.row.columns;
  const float threshold = std::max(NO_FLOOR, (float)(s.highest + draw.temperature * std::log(bound)));
  float *values = space.values.data(), *weights = space.weights.data();
  const int count = s.scan.gather(s.row, s.maxima, threshold, space.ids.data(), values);
  s.scan.weigh(values, count, by, weights, space.sums.data());
  return nucleus_floor(s.scan, values, weights, count, threshold, s.highest, draw.top_p * total);
}

int draw_filtered(const Summary& s, const Draw& draw) {
  Workspace& space = workspace;
  space.resize(s.row.columns);
  float threshold = NO_FLOOR;
  if (draw.top_k > 0.0 && draw.top_k < s.row.columns) threshold = std::max(threshold, kth_largest(s, (int)draw.top_k));
  if (draw.min_p > 0.0)
    threshold = std::max(threshold, (float)(s.highest + draw.temperature * std::log(draw.min_p)));
  int32_t* ids = space.ids.data();
  float *values = space.values.data(), *weights = space.weights.data();
  const int count = s.scan.gather(s.row, s.maxima, threshold, ids, values);
  s.scan.weigh(values, count, {s.highest, scale_of(draw.temperature), NO_FLOOR}, weights, space.sums.data());
  if (draw.top_p < 1.0) {
    const double wanted = draw.top_p * sum_of(space.sums.data(), groups_of(count));
    const float floor = nucleus_floor(s.scan, values, weights, count, threshold, s.highest, wanted);
    for (int i = 0; i < count; i++) weights[i] = values[i] >= floor ? weights[i] : 0.0f;
    s.scan.add(weights, count, space.sums.data());
  }
  double target;
  const int first = GROUP * draw_group(space.sums.data(), groups_of(count), draw.noise, target);
  return ids[first + draw_place(weights + first, std::min(GROUP, count - first), target)];
}

int choose(const Summary& s, const Draw& draw) {
  if (!std::isfinite(s.highest)) return -1;
  if (draw.temperature == 0.0) return likeliest(s);
  return is_filtered(draw, s.row.columns) ? draw_filtered(s, draw) : draw_from_row(s, draw);
}

// The k most likely columns; of equal ones the lowest first.
void list_likeliest(const Summary& s, int k, double log_sum, int32_t* top_ids, double* top_logprobs) {
  Workspace& space = workspace;
  space.resize(s.row.columns);
  const float threshold = kth_largest(s, k);
  const int count = s.scan.gather(s.row, s.maxima, threshold, space.ids.data(), space.values.data());
  std::partial_sort(space.ids.begin(), space.ids.begin() + k, space.ids.begin() + count, [&](int32_t a, int32_t b) {
    const float x = s.at(a), y = s.at(b);
    return x > y || (x == y && a < b);
  });
  for (int i = 0; i < k; i++) {
    top_ids[i] = space.ids[i];
    top_logprobs[i] = s.at(top_ids[i]) - log_sum;
  }
}

}  // namespace

extern "C" {

// Let the caller check that both sides use the same structures.
EXPORT int serve_llm_matrix_bytes() { return sizeof(Matrix); }
EXPORT int serve_llm_draw_bytes() { return sizeof(Draw); }

// draws: one per row. chosen: the sampled column of each row.
EXPORT void serve_llm_choose(const Matrix* matrix, const Draw* draws, int64_t* chosen, int variant, int threads) {
  const auto scale = [&](int row) {
    const Draw& draw = draws[row];
    return draw.temperature == 0.0 || is_filtered(draw, matrix->columns) ? 0.0f : scale_of(draw.temperature);
  };
  bool weighted = false;
  for (int row = 0; row < matrix->rows; row++) weighted |= scale(row) > 0.0f;
  each_row(
      *matrix, *VARIANTS[variant], threads, weighted, scale,
      [&](int row, const Summary& s) {
        return scale(row) > 0.0f && draws[row].top_p < 1.0 ? floor_of_row(s, draws[row]) : NO_FLOOR;
      },
      [&](int row, const Summary& s) { chosen[row] = choose(s, draws[row]); });
}

// rows: `count` different ones. masks: (count, ceil(columns / 32)). Changes the matrix.
EXPORT void serve_llm_apply_masks(const Matrix* matrix, const int64_t* rows, const uint32_t* masks, int count,
                                  int variant, int threads) {
  const int64_t words = (matrix->columns + 31) / 32;
  if ((int64_t)count * matrix->columns <= WORTH_THREADS) threads = 1;
  parallel(count, 1, threads, [&](int64_t first, int64_t last) {
    for (int64_t index = first; index < last; index++)
      VARIANTS[variant]->apply_mask(matrix->row((int)rows[index]), masks + index * words);
  });
}

EXPORT void serve_llm_likeliest(const Matrix* matrix, int64_t* chosen, int variant, int threads) {
  each_row(*matrix, *VARIANTS[variant], threads, false, [](int) { return 0.0f; }, without_floor,
           [&](int row, const Summary& s) { chosen[row] = likeliest(s); });
}

// ids: (rows, columns); the first counts[row] of each row are written.
EXPORT void serve_llm_largest(const Matrix* matrix, int k, int32_t* ids, int32_t* counts, int variant, int threads) {
  each_row(*matrix, *VARIANTS[variant], threads, false, [](int) { return 0.0f; }, without_floor,
           [&](int row, const Summary& s) {
    int32_t* to = ids + (int64_t)row * matrix->columns;
    if (!std::isfinite(s.highest)) {
      to[0] = likeliest(s);
      counts[row] = 1;
      return;
    }
    workspace.resize(matrix->columns);
    counts[row] = s.scan.gather(s.row, s.maxima, kth_largest(s, k), to, workspace.values.data());
  });
}

// k: 0 .. columns. top_ids and top_logprobs: (rows, k). The rank of a row that is not finite is 0.
EXPORT void serve_llm_logprobs(const Matrix* matrix, const int64_t* ids, int k, double* logprobs, int32_t* ranks,
                               int32_t* top_ids, double* top_logprobs, int variant, int threads) {
  each_row(*matrix, *VARIANTS[variant], threads, true, [](int) { return scale_of(1.0); }, without_floor,
           [&](int row, const Summary& s) {
             ranks[row] = 0;
             if (!std::isfinite(s.highest)) return;
             const double log_sum = s.highest + std::log(sum_of(s.sums, s.groups()));
             const float value = s.at(ids[row]);
             logprobs[row] = value - log_sum;
             ranks[row] = 1 + s.scan.count_above(s.row, s.maxima, value);
             const int64_t place = (int64_t)row * k;
             if (k > 0) list_likeliest(s, k, log_sum, top_ids + place, top_logprobs + place);
           });
}

}  // extern "C"
