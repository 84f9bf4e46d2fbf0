#include "protocol/values.hpp"

#include "protocol/elided_values.hpp"
#include "protocol/planes_values.hpp"
#include "protocol/raw_values.hpp"

namespace tailcut {

OpContext::OpContext(const Shape& shape, wire::Codec codec, std::vector<codec::PacketLimits> limits,
                     Memory& memory, Values& values, bool elided)
    : shape(shape),
      codec(codec),
      limits(std::move(limits)),
      memory(memory),
      values(values),
      elided(elided),
      silent(shape.ranks) {
    gather_limits = this->limits[shape.self];
    for (std::size_t peer = 0; peer < this->limits.size(); ++peer)
        if (peer != shape.self) gather_limits.lower_to(this->limits[peer]);
}

std::size_t owned_floats(wire::Codec codec, const Layout& layout) {
    return codec == wire::Codec::kPlanes ? PlanesReduction::floats(layout) : RawReduction::floats(layout);
}

std::unique_ptr<Values> make_values(wire::Codec codec, bool elided) {
    const bool planes = codec == wire::Codec::kPlanes;
    if (elided && planes)
        return std::make_unique<ValuesOf<ElidedPlanesContributions, ElidedPlanesReduction, ElidedMeans>>();
    if (elided) return std::make_unique<ValuesOf<ElidedRawContributions, ElidedRawReduction, ElidedMeans>>();
    if (planes) return std::make_unique<ValuesOf<PlanesContributions, PlanesReduction, PlanesMeans>>();
    return std::make_unique<ValuesOf<RawContributions, RawReduction, RawMeans>>();
}

}  // namespace tailcut
