// Memory of the caller's that ops work in.
#pragma once

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <span>

namespace tailcut {

using Bucket = nanobind::ndarray<float, nanobind::ndim<1>, nanobind::c_contig, nanobind::device::cpu>;

inline std::span<float> floats_of(const Bucket& bucket) { return {bucket.data(), bucket.size()}; }

inline std::span<float> residue_of(const std::optional<Bucket>& residue, const Bucket& bucket) {
    if (!residue) return {};
    if (residue->size() != bucket.size()) throw nanobind::value_error("residue and bucket differ in length");
    return floats_of(*residue);
}

}  // namespace tailcut
