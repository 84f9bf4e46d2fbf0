// Presents rows of plain structs as a NumPy array. Its dtype has the struct's listed names, its types and its
// offsets.
#pragma once

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "protocol/reports/fields.hpp"

namespace tailcut {

template <Listed Row>
nanobind::object dtype_of() {
    std::vector<std::string> names, formats;
    std::vector<std::size_t> offsets;
    const Row row{};
    Row::visit_fields([&](const char* name, auto field) {
        using Value = std::remove_cvref_t<decltype(row.*field)>;
        static_assert(std::is_integral_v<Value> || std::is_enum_v<Value>);
        const bool flag = std::is_same_v<Value, bool>;
        const char kind = flag ? '?' : std::is_signed_v<Value> ? 'i' : 'u';
        names.emplace_back(name);
        formats.push_back(flag ? "?" : kind + std::to_string(sizeof(Value)));
        offsets.push_back(static_cast<std::size_t>(reinterpret_cast<const char*>(&(row.*field)) -
                                                   reinterpret_cast<const char*>(&row)));
    });
    nanobind::dict fields;
    fields["names"] = names;
    fields["formats"] = formats;
    fields["offsets"] = offsets;
    fields["itemsize"] = sizeof(Row);
    return nanobind::module_::import_("numpy").attr("dtype")(fields);
}

class Table : public nanobind::object {
    static bool is_table(PyObject*) { return true; }  // such objects are made only here
    NB_OBJECT(Table, object, "numpy.typing.NDArray[typing.Any]", is_table)
};

template <Listed Row>
Table table_of(std::vector<Row> rows) {
    static_assert(std::is_trivially_copyable_v<Row> && std::is_standard_layout_v<Row>);
    auto kept = std::make_unique<std::vector<Row>>(std::move(rows));
    auto* const bytes = reinterpret_cast<std::uint8_t*>(kept->data());
    const std::size_t count = kept->size() * sizeof(Row);
    const nanobind::capsule owner(kept.release(),
                                  [](void* p) noexcept { delete static_cast<std::vector<Row>*>(p); });
    const nanobind::ndarray<nanobind::numpy, std::uint8_t, nanobind::ndim<1>> array(bytes, {count}, owner);
    const nanobind::object table = nanobind::cast(array).attr("view")(dtype_of<Row>());
    return nanobind::borrow<Table>(table);
}

}  // namespace tailcut
