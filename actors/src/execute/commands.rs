//! The command table: where every MongoDB command runs, and what is refused and why. The
//! compatibility page is made from it.

/// What a command is to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Answered by the handshake code or the daemon itself.
    Local,
    /// A read of one collection: tiered collections follow the read table.
    Read(Read),
    /// A write to one collection: tiered collections are written on the fast tier.
    Write(Write),
    /// Continues a cursor where it was opened.
    GetMore,
    /// Ends cursors where they were opened.
    KillCursors,
    /// Ends or refreshes sessions on both tiers.
    Sessions,
    /// Ends the transaction on the tier it is pinned to.
    EndTransaction,
    /// Runs on the archive, whatever it names: definitions are read there, statistics are its.
    Archive,
    /// Runs on the archive unless it names a tiered collection (or its database), which is refused.
    ArchiveUnlessTiered(&'static str),
    /// Explains a command where it would run.
    Explain,
    /// Refused always, with what to do instead.
    Refused(&'static str),
}

/// Reads of one collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// `find`.
    Find,
    /// `aggregate`.
    Aggregate,
    /// `count`.
    Count,
    /// `distinct`.
    Distinct,
}

/// Writes to one collection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// `insert`.
    Insert,
    /// `update`.
    Update,
    /// `delete`.
    Delete,
    /// `findAndModify`.
    FindAndModify,
}

/// One row.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    /// The command, and its metric label.
    pub name: &'static str,
    /// What the daemon does.
    pub action: Action,
    /// Whether it may be sent again after a broken connection: it changes nothing.
    pub reads_only: bool,
}

const fn read(name: &'static str, action: Action) -> Entry {
    Entry { name, action, reads_only: true }
}

const fn write(name: &'static str, action: Action) -> Entry {
    Entry { name, action, reads_only: false }
}

const OPERATOR: &str =
    "it would change a member of one tier behind Halocline; connect to that member directly";
const DEFINITION: &str = "definitions of a tiered collection must change on both tiers together, which this release does not do; stop Halocline, change the archive and the fast tier, and start it again";
const BEHIND_THE_RULES: &str = "it writes past the tiering rules; run it on an untiered collection";

/// Sorted by name.
const TABLE: &[Entry] = &[
    read("abortTransaction", Action::EndTransaction),
    read("aggregate", Action::Read(Read::Aggregate)),
    write("appendOplogNote", Action::Refused(OPERATOR)),
    write("applyOps", Action::Refused(BEHIND_THE_RULES)),
    read("atlasVersion", Action::Archive),
    write("autoCompact", Action::Refused(OPERATOR)),
    read("buildInfo", Action::Archive),
    read("buildinfo", Action::Archive),
    write(
        "bulkWrite",
        Action::Refused(
            "send insert, update and delete commands instead; drivers do so by themselves when they use collection-level bulk writes",
        ),
    ),
    write("cloneCollectionAsCapped", Action::ArchiveUnlessTiered(DEFINITION)),
    write("collMod", Action::ArchiveUnlessTiered(DEFINITION)),
    read("collStats", Action::Archive),
    read("collstats", Action::Archive),
    write("commitTransaction", Action::EndTransaction),
    write("compact", Action::Refused(OPERATOR)),
    read("connPoolStats", Action::Archive),
    read("connectionStatus", Action::Archive),
    write("convertToCapped", Action::ArchiveUnlessTiered(DEFINITION)),
    read("count", Action::Read(Read::Count)),
    write("create", Action::ArchiveUnlessTiered(DEFINITION)),
    write("createIndexes", Action::ArchiveUnlessTiered(DEFINITION)),
    write("createRole", Action::Archive),
    write("createUser", Action::Archive),
    read("currentOp", Action::Archive),
    read("dataSize", Action::Archive),
    read("dbHash", Action::Archive),
    read("dbStats", Action::Archive),
    read("dbstats", Action::Archive),
    write("delete", Action::Write(Write::Delete)),
    read("distinct", Action::Read(Read::Distinct)),
    write("drop", Action::ArchiveUnlessTiered(DEFINITION)),
    write("dropAllRolesFromDatabase", Action::Archive),
    write("dropAllUsersFromDatabase", Action::Archive),
    write("dropDatabase", Action::ArchiveUnlessTiered(DEFINITION)),
    write("dropIndexes", Action::ArchiveUnlessTiered(DEFINITION)),
    write("dropRole", Action::Archive),
    write("dropUser", Action::Archive),
    write("endSessions", Action::Sessions),
    read("explain", Action::Explain),
    read("features", Action::Archive),
    read("filemd5", Action::Archive),
    read("find", Action::Read(Read::Find)),
    write("findAndModify", Action::Write(Write::FindAndModify)),
    write("findandmodify", Action::Write(Write::FindAndModify)),
    write("fsync", Action::Refused(OPERATOR)),
    write("fsyncUnlock", Action::Refused(OPERATOR)),
    read("getCmdLineOpts", Action::Archive),
    read("getDefaultRWConcern", Action::Archive),
    read("getLastError", Action::Refused("it left MongoDB with release 5.1; use a write concern")),
    read("getLog", Action::Archive),
    write("getMore", Action::GetMore),
    read("getParameter", Action::Archive),
    write("grantPrivilegesToRole", Action::Archive),
    write("grantRolesToRole", Action::Archive),
    write("grantRolesToUser", Action::Archive),
    read("hello", Action::Local),
    read("hostInfo", Action::Archive),
    write("insert", Action::Write(Write::Insert)),
    write("invalidateUserCache", Action::Archive),
    read("isMaster", Action::Local),
    read("isdbgrid", Action::Archive),
    read("ismaster", Action::Local),
    write("killAllSessions", Action::Sessions),
    write("killAllSessionsByPattern", Action::Sessions),
    write("killCursors", Action::KillCursors),
    write("killOp", Action::Archive),
    write("killSessions", Action::Sessions),
    read("listCollections", Action::Archive),
    read("listCommands", Action::Archive),
    read("listDatabases", Action::Archive),
    read("listIndexes", Action::Archive),
    write("logApplicationMessage", Action::Archive),
    write("logRotate", Action::Refused(OPERATOR)),
    write("mapReduce", Action::ArchiveUnlessTiered(BEHIND_THE_RULES)),
    write("mapreduce", Action::ArchiveUnlessTiered(BEHIND_THE_RULES)),
    read("ping", Action::Archive),
    read("planCacheClear", Action::Archive),
    read("planCacheClearFilters", Action::Archive),
    read("planCacheListFilters", Action::Archive),
    read("planCacheSetFilter", Action::Archive),
    read("profile", Action::Archive),
    write("reIndex", Action::Refused(OPERATOR)),
    write("refreshSessions", Action::Sessions),
    write("renameCollection", Action::ArchiveUnlessTiered(DEFINITION)),
    read("replSetGetConfig", Action::Refused(OPERATOR)),
    read("replSetGetStatus", Action::Refused(OPERATOR)),
    write("resync", Action::Refused(OPERATOR)),
    write("revokePrivilegesFromRole", Action::Archive),
    write("revokeRolesFromRole", Action::Archive),
    write("revokeRolesFromUser", Action::Archive),
    read("rolesInfo", Action::Archive),
    write("rotateCertificates", Action::Refused(OPERATOR)),
    read("serverStatus", Action::Archive),
    write("setDefaultRWConcern", Action::Refused(OPERATOR)),
    write(
        "setFeatureCompatibilityVersion",
        Action::Refused(
            "both tiers must run one feature compatibility version; set it on each directly",
        ),
    ),
    write("setIndexCommitQuorum", Action::Refused(OPERATOR)),
    write("setParameter", Action::Refused(OPERATOR)),
    write("setUserWriteBlockMode", Action::Refused(OPERATOR)),
    write("shutdown", Action::Refused(OPERATOR)),
    write("startSession", Action::Archive),
    read("top", Action::Archive),
    write("update", Action::Write(Write::Update)),
    write("updateRole", Action::Archive),
    write("updateUser", Action::Archive),
    read("usersInfo", Action::Archive),
    read("validate", Action::Archive),
    read("whatsmyuri", Action::Archive),
];

/// The row of a command, if it has one.
#[must_use]
pub fn lookup(name: &str) -> Option<&'static Entry> {
    TABLE.binary_search_by(|entry| entry.name.cmp(name)).ok().and_then(|at| TABLE.get(at))
}

/// Every row, for the compatibility page.
#[must_use]
pub fn table() -> &'static [Entry] {
    TABLE
}

/// Families of commands that run on members of a replica set, not on a deployment.
#[must_use]
pub fn is_member_command(name: &str) -> bool {
    name.starts_with("replSet") || name.starts_with("_") || name.starts_with("configure")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_found_by_its_name() {
        assert!(TABLE.is_sorted_by(|a, b| a.name < b.name));
        for entry in TABLE {
            assert_eq!(lookup(entry.name).unwrap().name, entry.name);
        }
        assert!(lookup("nonsense").is_none());
    }
}
