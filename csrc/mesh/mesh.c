// mesh.c: see mesh.h.
#include "mesh/mesh.h"

rm_code rm_mesh_create(int64_t tp, int64_t dp, int64_t ep, rm_mesh *out, rm_error *err) {
  RM_TRY(rm_check_range(err, RM_E_CONFIG, "tp", tp, 1, RM_MAX_WORLD));
  RM_TRY(rm_check_range(err, RM_E_CONFIG, "dp", dp, 1, RM_MAX_WORLD));
  RM_TRY(rm_check_range(err, RM_E_CONFIG, "ep", ep, 1, RM_MAX_WORLD));
  RM_FAIL_IF(tp * dp > RM_MAX_WORLD, RM_E_CONFIG,
             "dp*tp: expected at most %d ranks, got %ld (dp=%ld, tp=%ld)", RM_MAX_WORLD, tp * dp,
             dp, tp);
  RM_FAIL_IF(ep != 1 && ep != tp && ep != dp * tp, RM_E_CONFIG,
             "ep: expected 1, tp=%ld or dp*tp=%ld, got %ld", tp, dp * tp, ep);
  *out = (rm_mesh){.tp = (int32_t)tp, .dp = (int32_t)dp, .ep = (int32_t)ep};
  return RM_OK;
}

rm_coords rm_mesh_coords(const rm_mesh *mesh, int32_t rank) {
  return (rm_coords){.tp = rank % mesh->tp,
                     .dp = rank / mesh->tp,
                     .ep = rank % mesh->ep};   // ep is 1, tp or the world
}

int32_t rm_mesh_rank(const rm_mesh *mesh, int32_t dp, int32_t tp) { return dp * mesh->tp + tp; }

rm_peers rm_mesh_peers(const rm_mesh *mesh, int32_t rank, rm_axis axis) {
  switch (axis) {
    case RM_AXIS_TP:
      return (rm_peers){.first = rank - rank % mesh->tp, .step = 1, .count = mesh->tp};
    case RM_AXIS_DP:
      return (rm_peers){.first = rank % mesh->tp, .step = mesh->tp, .count = mesh->dp};
    default: return (rm_peers){.first = rank - rank % mesh->ep, .step = 1, .count = mesh->ep};
  }
}
