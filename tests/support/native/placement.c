// placement.c: properties of meshes and placements over random models and worlds.
//
// Input: random degrees (kept if they are valid), a random small spec, all its parameters. Oracles,
// which do not repeat the computation of placement.c: coordinates and ranks map one to one, and
// peers differ in one axis only. In each replica every row of every parameter is held once.
// Exceptions are KV heads, which are held by exactly the ranks that have a query head of the group,
// and parameters that are whole everywhere, each of which is owned by one rank of the world.
// Replicas are equal; an expert is whole on one rank of its axis; parts differ by one unit at most.
//
//   placement [--cases 20000] [--seed 1] [--plant 1: the last row of each part is denied]
#include "model/params.h"
#include <string.h>

#include "common/fuzz.h"

enum { MAX_ROWS = 1 << 12 };

typedef struct world {
  fuzz f;
  rm_mesh mesh;
  rm_spec *spec;
  rm_params *params;
  long rows;
} world;

#define MUST(w, condition, ...) \
  do { \
    if (!(condition)) fprintf(stderr, "%s\n", fuzz_where(&(w)->f)), tiny_die(__VA_ARGS__); \
  } while (0)

// ------------------------------------------------------------------------------------------ input
static int64_t pick(fuzz *f, int64_t low, int64_t high) {
  return low + fuzz_below(f, high - low + 1);
}

// A legal mesh and model, or 0.
static int make(world *w) {
  fuzz *f = &w->f;
  const int64_t tp = pick(f, 1, 9), dp = pick(f, 1, 4),
                ep = (const int64_t[]){1, tp, dp * tp}[fuzz_below(f, 3)];
  rm_error err = RM_ERROR_INIT;
  tiny_must(rm_mesh_create(tp, dp, ep, &w->mesh, &err), &err);
  enum { MAX_LAYERS = 3 };
  const float inv_freq[8] = {1};
  rm_layer_spec layers[MAX_LAYERS];
  const int64_t n_layers = pick(f, 1, MAX_LAYERS), kv = pick(f, 1, 6),
                experts = fuzz_one_in(f, 3) ? 0 : pick(f, 1, 3) * ep;
  for (int i = 0; i < n_layers; i++)
    layers[i] =
        (rm_layer_spec){.is_moe = experts && fuzz_one_in(f, 2),
                        .kind = i && fuzz_one_in(f, 2) ? RM_LAYER_DELTA_NET : RM_LAYER_ATTENTION};
  const int64_t delta_heads = pick(f, 1, 4);
  if (experts) layers[0].is_moe = 1;
  const int64_t norms = pick(f, 1, 3); // before, after, both
  const rm_spec values = {
      .vocab_size = pick(f, 1, 1500),
      .hidden_size = pick(f, 1, 200),
      .intermediate_size = pick(f, 1, 300),
      .n_layers = n_layers,
      .n_heads = kv * pick(f, 1, 8),
      .n_kv_heads = kv,
      .head_dim = 2 * pick(f, 1, 8),
      .n_experts = experts,
      .top_k = experts ? 1 : 0,
      .n_groups = 1,
      .top_groups = 1,
      .route_scale = 1,
      .shared_intermediate_size = experts && fuzz_one_in(f, 2) ? pick(f, 1, 100) : 0,
      .shared_switch = fuzz_one_in(f, 2),
      .norm_before = norms != 2,
      .norm_after = norms > 1,
      .moe_intermediate_size = experts ? pick(f, 1, 100) : 0,
      .qk_norm = (rm_qk_norm)pick(f, 0, 2),
      .attention_bias = fuzz_one_in(f, 2),
      .o_bias = fuzz_one_in(f, 2),
      .tie_word_embeddings = fuzz_one_in(f, 2),
      .rms_norm_eps = 1e-6f,
      .delta_k_heads = delta_heads,
      .delta_v_heads = delta_heads * pick(f, 1, 6),
      .delta_k_dim = pick(f, 1, 9),
      .delta_v_dim = pick(f, 1, 9),
      .delta_kernel = pick(f, 1, 4),
      .rope_scale = 1,
      .inv_freq = inv_freq,
      .layers = layers,
  };
  if (values.n_heads % tp || values.delta_v_heads % tp || rm_spec_create(&values, &w->spec, &err))
    return 0;
  MUST(w, !rm_placement_check(w->spec, &w->mesh, &err) == !(ep > 1 && !experts),
       "the verdict on ep=%d", w->mesh.ep);
  rm_error_clear(&err);
  if (ep > 1 && !experts) {
    rm_spec_destroy(w->spec);
    return 0;
  }
  tiny_must(rm_params_create(w->spec, NULL, RM_BF16, 0, &w->params, &err), &err);
  return 1;
}

// ------------------------------------------------------------------------------------------- mesh
static void check_mesh(world *w) {
  const rm_mesh *mesh = &w->mesh;
  for (int32_t rank = 0; rank < rm_mesh_world(mesh); rank++) {
    const rm_coords at = rm_mesh_coords(mesh, rank);
    MUST(w,
         rm_mesh_rank(mesh, at.dp, at.tp) == rank && at.tp < mesh->tp && at.dp < mesh->dp &&
             at.ep < mesh->ep,
         "rank %d", rank);
    for (int axis = RM_AXIS_TP; axis <= RM_AXIS_EP; axis++) {
      const rm_peers peers = rm_mesh_peers(mesh, rank, (rm_axis)axis);
      const int32_t own[3] = {at.tp, at.dp, at.ep}, size[3] = {mesh->tp, mesh->dp, mesh->ep};
      MUST(w, peers.count == size[axis], "rank %d has %d peers on axis %d", rank, peers.count,
           axis);
      for (int32_t i = 0; i < peers.count; i++) {
        const rm_coords other = rm_mesh_coords(mesh, peers.first + i * peers.step);
        const int32_t there[3] = {other.tp, other.dp, other.ep};
        MUST(w, there[axis] == i, "peer %d of rank %d stands at %d on axis %d", i, rank,
             there[axis], axis);
        MUST(w, axis != RM_AXIS_TP || other.dp == at.dp,
             "a tp peer of rank %d is in another replica", rank);
        MUST(w, axis != RM_AXIS_DP || other.tp == at.tp, "a dp peer of rank %d has another shard",
             rank);
        MUST(w, i != own[axis] || peers.first + i * peers.step == rank,
             "rank %d is not its own peer", rank);
      }
    }
  }
}

// -------------------------------------------------------------------------------------- placement
static int is_delta_key(rm_param_kind kind) {
  return kind == RM_P_DELTA_Q || kind == RM_P_DELTA_K || kind == RM_P_CONV_Q || kind == RM_P_CONV_K;
}

// Returns 1 if the query heads of the rank (the value heads of delta nets), divided in equal runs,
// read this row of K or V (of q or k).
static int reads_row(const world *w, int32_t rank, rm_param_kind kind, int64_t row) {
  const rm_spec *s = w->spec;
  const int of_delta = is_delta_key(kind);
  const int64_t heads = of_delta ? s->delta_v_heads : s->n_heads,
                kv_heads = of_delta ? s->delta_k_heads : s->n_kv_heads,
                dim = of_delta ? s->delta_k_dim : s->head_dim;
  const int64_t per_rank = heads / w->mesh.tp, group = heads / kv_heads;
  for (int64_t h = 0; h < per_rank; h++)
    if ((rm_mesh_coords(&w->mesh, rank).tp * per_rank + h) / group == row / dim) return 1;
  return 0;
}

static int is_kv(const world *w, rm_param_kind kind) {
  return kind == RM_P_K || kind == RM_P_V || kind == RM_P_K_BIAS || kind == RM_P_V_BIAS ||
         (kind == RM_P_K_NORM && w->spec->qk_norm == RM_QK_NORM_WHOLE) || is_delta_key(kind);
}

static int is_whole(const world *w, rm_param_kind kind) {
  return kind == RM_P_FINAL_NORM || kind == RM_P_INPUT_NORM || kind == RM_P_POST_ATTN_NORM ||
         kind == RM_P_PRE_MLP_NORM || kind == RM_P_POST_MLP_NORM ||
         ((kind == RM_P_Q_NORM || kind == RM_P_K_NORM) && w->spec->qk_norm == RM_QK_NORM_HEAD) ||
         kind == RM_P_DELTA_NORM || kind == RM_P_ROUTER || kind == RM_P_ROUTER_BIAS ||
         kind == RM_P_SHARED_SWITCH;
}

static void check_range(world *w, const rm_param *param, rm_range r) {
  const int64_t total = param->n_dims == 1 ? param->cols : param->rows;
  MUST(w, r.n >= 0 && r.first >= 0 && r.first + r.n <= total, "rows %lld + %lld of %lld",
       (long long)r.first, (long long)r.n, (long long)total);
  MUST(w, !is_whole(w, param->kind) || r.n == total,
       "a part of a parameter that is whole everywhere");
  MUST(w, !(param->expert >= 0 && w->mesh.ep > 1) || r.n == 0 || r.n == total,
       "a part of an expert with ep=%d", w->mesh.ep);
}

// Checks the ranks that together hold one copy: a tp group, or the ep group for experts that are
// placed separately.
static void check_copy(world *w, const rm_param *param, rm_peers group) {
  static unsigned char held[MAX_ROWS];
  const int64_t total = param->n_dims == 1 ? param->cols : param->rows;
  int64_t most = 0, least = INT64_MAX;
  memset(held, 0, (size_t)total);
  for (int32_t i = 0; i < group.count; i++) {
    const int32_t rank = group.first + i * group.step;
    const rm_placement p = rm_placement_of(w->spec, &w->mesh, rank);
    rm_range r = rm_param_rows_of(w->params, &p, param);
    if (w->f.plant && r.n) r.n--;
    check_range(w, param, r);
    for (int64_t row = r.first; row < r.first + r.n; row++) held[row]++;
    for (int64_t row = 0; is_kv(w, param->kind) && row < total; row++)
      MUST(w, reads_row(w, rank, param->kind, row) == (row >= r.first && row < r.first + r.n),
           "row %lld of K on rank %d", (long long)row, rank);
    most = rm_max64(most, r.n), least = rm_min64(least, r.n);
    w->rows += r.n;
  }
  const int64_t unit =
      param->kind == RM_P_EMBED || param->kind == RM_P_LM_HEAD ? RM_SHARD_VOCAB : RM_SHARD_WIDTH;
  const int cut = !is_kv(w, param->kind) && !is_whole(w, param->kind);
  for (int64_t row = 0; row < total && cut; row++)
    MUST(w, held[row] == 1, "row %lld of kind %d is held %d times", (long long)row, param->kind,
         held[row]);
  MUST(w,
       !cut || param->expert >= 0 || param->kind == RM_P_Q || param->kind == RM_P_Q_BIAS ||
           (param->kind >= RM_P_DELTA_V && param->kind <= RM_P_DELTA_Z) ||
           param->kind == RM_P_CONV_V || most - least <= unit,
       "parts of %lld and %lld rows", (long long)most, (long long)least);
}

// Each row is owned once in the world, by a rank that holds it.
static void check_counted(world *w, const rm_param *param) {
  static unsigned char counted[MAX_ROWS];
  const int64_t total = param->n_dims == 1 ? param->cols : param->rows;
  memset(counted, 0, (size_t)total);
  for (int32_t rank = 0; rank < rm_mesh_world(&w->mesh); rank++) {
    const rm_placement p = rm_placement_of(w->spec, &w->mesh, rank);
    const rm_range held = rm_param_rows_of(w->params, &p, param);
    const rm_range r =
        held.n ? rm_placement_counted(w->spec, &p, rm_kind_rows(w->spec, param->kind)) : held;
    MUST(w, r.n == 0 || (r.first >= held.first && r.first + r.n == held.first + held.n),
         "rank %d answers for rows it lacks", rank);
    for (int64_t row = r.first; row < r.first + r.n; row++) counted[row]++;
  }
  for (int64_t row = 0; row < total; row++)
    MUST(w, counted[row] == 1, "row %lld of kind %d is answered for %d times", (long long)row,
         param->kind, counted[row]);
}

static void check_param(world *w, const rm_param *param) {
  check_counted(w, param);
  const int spread = param->expert >= 0 && w->mesh.ep > 1;
  const int32_t step = spread ? w->mesh.ep : w->mesh.tp;
  for (int32_t first = 0; first < rm_mesh_world(&w->mesh); first += step)
    check_copy(w, param, rm_mesh_peers(&w->mesh, first, spread ? RM_AXIS_EP : RM_AXIS_TP));
}

int main(int argc, char **argv) {
  static world w;
  long models = 0, parameters = 0;
  w.f = fuzz_begin(argc, argv, 20000, 1);
  while (fuzz_next_case(&w.f)) {
    if (!make(&w)) continue;
    check_mesh(&w);
    for (int64_t i = 0; i < w.params->n; i++) check_param(&w, &w.params->list[i]);
    models++, parameters += w.params->n;
    rm_params_destroy(w.params);
    rm_spec_destroy(w.spec);
  }
  printf("placement: %ld models on as many meshes, %ld parameters, %ld rows placed, seed %" PRIu64
         "\n",
         models, parameters, w.rows, w.f.seed);
  return 0;
}
