//! Users and groups from /etc/passwd and /etc/group, read without NSS: the agent is static, and
//! images may have neither file.

use std::fs;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    /// All groups, the primary one first.
    pub groups: Vec<u32>,
    pub home: String,
}

/// The text of the two files.
#[derive(Debug, Default, Clone)]
pub struct Database {
    passwd: String,
    group: String,
}

impl Database {
    pub fn load() -> Self {
        let read = |path| {
            fs::read(path)
                .map(|data| String::from_utf8_lossy(&data).into_owned())
                .unwrap_or_default()
        };
        Self {
            passwd: read("/etc/passwd"),
            group: read("/etc/group"),
        }
    }

    /// The user that `spec` (name, uid, or either with `:group`) means; None if there is none.
    ///
    /// A uid without an entry is accepted, as Docker does; root exists in every image.
    pub fn find(&self, spec: &str) -> Option<User> {
        let (who, group) = match spec.split_once(':') {
            Some((who, group)) => (who, Some(group)),
            None => (spec, None),
        };
        let mut user = self
            .entry(|name, uid| name == who || who.parse() == Ok(uid))
            .or_else(|| Self::without_entry(who))?;
        if let Some(group) = group.filter(|text| !text.is_empty()) {
            user.gid = group.parse().ok().or_else(|| self.group_id(group))?;
        }
        user.groups = self.groups_of(&user);
        Some(user)
    }

    /// The default: `user` where the image has one, else root.
    pub fn fallback(&self) -> User {
        self.find("user")
            .or_else(|| self.find("root"))
            .expect("root is found in any image")
    }

    pub fn user_name(&self, uid: u32) -> String {
        self.entry(|_, id| id == uid)
            .map_or_else(|| uid.to_string(), |user| user.name)
    }

    pub fn group_name(&self, gid: u32) -> String {
        self.groups()
            .find(|(_, id, _)| *id == gid)
            .map_or_else(|| gid.to_string(), |(name, _, _)| name.to_owned())
    }

    fn without_entry(who: &str) -> Option<User> {
        let uid = if who == "root" { 0 } else { who.parse().ok()? };
        let home = if uid == 0 && fs::metadata("/root").is_ok() {
            "/root"
        } else {
            "/"
        };
        let name = if uid == 0 {
            "root".to_owned()
        } else {
            who.to_owned()
        };
        Some(User {
            name,
            uid,
            gid: 0,
            groups: vec![0],
            home: home.to_owned(),
        })
    }

    fn entry(&self, wanted: impl Fn(&str, u32) -> bool) -> Option<User> {
        self.passwd.lines().find_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let uid = fields.nth(1)?.parse().ok()?;
            let gid = fields.next()?.parse().ok()?;
            let home = fields.nth(1).filter(|home| !home.is_empty()).unwrap_or("/");
            (!name.is_empty() && wanted(name, uid)).then(|| User {
                name: name.to_owned(),
                uid,
                gid,
                groups: vec![gid],
                home: home.to_owned(),
            })
        })
    }

    fn groups(&self) -> impl Iterator<Item = (&str, u32, &str)> {
        self.group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let name = fields.next()?;
            let gid = fields.nth(1)?.parse().ok()?;
            Some((name, gid, fields.next().unwrap_or("")))
        })
    }

    fn group_id(&self, name: &str) -> Option<u32> {
        self.groups()
            .find(|(group, _, _)| *group == name)
            .map(|(_, gid, _)| gid)
    }

    fn groups_of(&self, user: &User) -> Vec<u32> {
        let mut found = vec![user.gid];
        for (_, gid, members) in self.groups() {
            if gid != user.gid && members.split(',').any(|member| member == user.name) {
                found.push(gid);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn database() -> Database {
        Database {
            passwd: "root:x:0:0:root:/root:/bin/sh\nbroken\nuser:x:1000:1000::/home/user:\n".into(),
            group: "root:x:0:\nsudo:x:27:user,other\nuser:x:1000:\nstaff:x:50:\n".into(),
        }
    }

    #[test]
    fn users_are_found_by_name_uid_and_group() {
        let db = database();
        let user = db.find("user").unwrap();
        assert_eq!(
            (user.uid, user.home.as_str(), &user.groups[..]),
            (1000, "/home/user", &[1000, 27][..])
        );
        assert_eq!(db.find("1000").unwrap(), user);
        let staff = db.find("user:staff").unwrap();
        assert_eq!((staff.gid, &staff.groups[..]), (50, &[50, 27][..]));
        assert_eq!(db.find("4242:7").map(|u| (u.uid, u.gid)), Some((4242, 7)));
        assert!(db.find("nobody").is_none() && db.find("user:none").is_none());
        assert_eq!(db.fallback().name, "user");
    }

    #[test]
    fn an_image_without_files_has_root() {
        let db = Database::default();
        assert_eq!(db.fallback().uid, 0);
        assert_eq!(
            (db.user_name(5), db.group_name(6)),
            ("5".to_owned(), "6".to_owned())
        );
    }

    #[test]
    fn names_come_from_the_files() {
        let db = database();
        assert_eq!(
            (db.user_name(1000), db.group_name(27)),
            ("user".to_owned(), "sudo".to_owned())
        );
    }
}
