#include "protocol/values/values.hpp"

#include "protocol/values/elided_values.hpp"
#include "protocol/values/planes_values.hpp"
#include "protocol/values/raw_values.hpp"

namespace tailcut {

std::size_t owned_floats(wire::Codec codec, const Layout& layout) {
    return codec == wire::Codec::kPlanes ? PlanesReduction::floats(layout) : RawReduction::floats(layout);
}

std::unique_ptr<Values> make_values(wire::Codec codec, bool elided) {
    const bool planes = codec == wire::Codec::kPlanes;
    if (elided && planes)
        return std::make_unique<CarryingValuesOf<ElidedLateShard, ElidedPlanesContributions,
                                                 ElidedPlanesReduction, ElidedMeans>>();
    if (elided)
        return std::make_unique<
            CarryingValuesOf<ElidedLateShard, ElidedRawContributions, ElidedRawReduction, ElidedMeans>>();
    if (planes)
        return std::make_unique<
            CarryingValuesOf<PlanesLateShard, PlanesContributions, PlanesReduction, PlanesMeans>>();
    return std::make_unique<CarryingValuesOf<RawLateShard, RawContributions, RawReduction, RawMeans>>();
}

}  // namespace tailcut
