//! The layering rule: the folder is the layer, and a crate depends on lower ranks only.

use std::collections::BTreeMap;

/// A crate of the workspace.
#[derive(Clone, Debug)]
pub struct Package {
    /// Without the `beeline-` prefix: `kv`, `fabric-shm`.
    pub name: String,
    /// First folder of its path: `foundation`, `substrate`, ...
    pub folder: String,
    /// Ours that it depends on.
    pub dependencies: Vec<Dependency>,
}

/// An edge's far end.
#[derive(Clone, Debug)]
pub struct Dependency {
    /// Without the `beeline-` prefix.
    pub name: String,
    /// Needed by tests only.
    pub development: bool,
}

/// The rank of a folder; `None` for a folder nobody placed.
#[must_use]
pub fn rank(folder: &str) -> Option<u8> {
    Some(match folder {
        "foundation" => 0,
        "substrate" => 1,
        "engines" => 2,
        "systems" | "compiler" => 3,
        "apps" | "python" => 4,
        "verify" | "bench" | "fuzz" | "examples" | "xtask" => 5,
        _ => return None,
    })
}

/// Crates that only tests may reach across a layer, whatever the rank.
const TEST_HELPERS: [&str; 2] = ["fabric-sim", "fabric-conformance"];

/// The provider crates: reached through `fabric-open` alone.
#[must_use]
pub fn is_provider(name: &str) -> bool {
    let others = ["fabric-open", "fabric-conformance", "fabric-engine"];
    name.starts_with("fabric-") && !others.contains(&name)
}

/// Every edge that breaks the rule, with its remedy. `allowed` lists the edges inside one folder,
/// and those that a crate's tests alone need, as `(from, to, reason)`; an entry that no edge uses any more is a problem too.
#[must_use]
pub fn problems(packages: &[Package], allowed: &[(&str, &str, &str)]) -> Vec<String> {
    let by_name: BTreeMap<&str, &Package> =
        packages.iter().map(|package| (package.name.as_str(), package)).collect();
    let mut problems = Vec::new();
    let mut used = vec![false; allowed.len()];
    for from in packages {
        let Some(from_rank) = rank(&from.folder) else {
            problems.push(format!(
                "{} lies in {}/, which has no rank: move it to a layer's folder",
                from.name, from.folder
            ));
            continue;
        };
        for dependency in &from.dependencies {
            let Some(to) = by_name.get(dependency.name.as_str()) else { continue };
            let listed = allowed.iter().position(|(a, b, _)| *a == from.name && *b == to.name);
            if let Some(index) = listed {
                used[index] = true;
            }
            let edge = format!("{} ({}) -> {} ({})", from.name, from.folder, to.name, to.folder);
            if dependency.development && TEST_HELPERS.contains(&to.name.as_str()) {
                continue;
            }
            if dependency.development && listed.is_some() {
                continue;
            }
            if is_provider(&to.name) && from.name != "fabric-open" && from_rank < 5 {
                problems.push(format!(
                    "{edge}: providers are reached through fabric-open alone; depend on the traits \
                     in fabric, and let the edge of the program choose"
                ));
                continue;
            }
            if to.name == "fabric-open" && from_rank < 4 {
                problems.push(format!(
                    "{edge}: only apps and rank 5 open providers; take a fabric trait object instead"
                ));
                continue;
            }
            let Some(to_rank) = rank(&to.folder) else { continue };
            if to_rank > from_rank {
                problems.push(format!(
                    "{edge}: rank {from_rank} must not know rank {to_rank}; move the shared part \
                     down, or pass it in through a trait"
                ));
            } else if to_rank == from_rank && from.folder != to.folder && listed.is_none() {
                problems.push(format!("{edge}: folders of one rank do not know each other"));
            } else if to_rank == from_rank && listed.is_none() {
                problems.push(format!(
                    "{edge}: an edge inside one folder stands in the list in \
                     verify/architecture/tests/layers.rs with its reason, or goes"
                ));
            }
            if from.folder == "compiler" && to_rank > 1 && to.folder != "compiler" {
                problems.push(format!("{edge}: compiler/ uses foundation/ and substrate/ only"));
            }
        }
    }
    for ((from, to, reason), used) in allowed.iter().zip(used) {
        if !used {
            problems.push(format!("{from} -> {to} is listed ({reason}) but gone: remove the line"));
        }
        if reason.len() < 10 {
            problems.push(format!("{from} -> {to} is listed without a reason"));
        }
    }
    problems
}

/// The crates of the workspace at `root`, as cargo sees them.
///
/// Errors: cargo's message.
pub fn workspace(root: &std::path::Path) -> Result<Vec<Package>, String> {
    let metadata = cargo_metadata::MetadataCommand::new()
        .manifest_path(root.join("Cargo.toml"))
        .no_deps()
        .exec()
        .map_err(|error| error.to_string())?;
    let short = |name: &str| name.strip_prefix("beeline-").unwrap_or(name).to_owned();
    let packages = metadata.packages.iter().map(|package| {
        let path = package.manifest_path.strip_prefix(&metadata.workspace_root);
        let folder = path
            .ok()
            .and_then(|path| path.components().next())
            .map_or_else(String::new, |first| first.as_str().to_owned());
        let dependencies = package
            .dependencies
            .iter()
            .filter(|dependency| dependency.path.is_some())
            .map(|dependency| Dependency {
                name: short(&dependency.name),
                development: dependency.kind == cargo_metadata::DependencyKind::Development,
            })
            .collect();
        Package { name: short(&package.name), folder, dependencies }
    });
    Ok(packages.collect())
}
